// Shows the HTML that Python sends (source.py). It comes as a message and never as state: state is what a notebook can
// store, and vLLM's source is not to be stored.

function render({ model, el }) {
  const root = document.createElement("div");
  root.className = "pdlab-source";
  el.append(root);
  const ask = () => model.send({});

  function show(message) {
    if (message.html === undefined) return;
    const focused = ["button", ".code"].find((part) => root.querySelector(part)?.matches(":focus"));
    root.innerHTML = message.html;
    if (focused) root.querySelector(focused)?.focus({ preventScroll: true }); // or keys would go to the notebook
    const code = root.querySelector(".code");
    const marked = root.querySelector(".marked");
    if (code && marked) code.scrollTop = marked.offsetTop - code.clientHeight / 3;
  }

  root.addEventListener("click", (event) => {
    // Python sets it, and the page hears of it: set here, it would be asked for before Python knew.
    if (event.target.closest("button")) model.send({ whole: !model.get("whole") });
  });
  root.addEventListener("keydown", (event) => {
    if (/^(Arrow|Page|Home|End)/.test(event.key)) event.stopPropagation(); // scrolls the code, not the notebook
  });
  model.on("msg:custom", show);
  model.on("change:step", ask);
  model.on("change:whole", ask);
  ask();
  return () => {
    model.off("msg:custom", show);
    model.off("change:step", ask);
    model.off("change:whole", ask);
  };
}

export default { render };
