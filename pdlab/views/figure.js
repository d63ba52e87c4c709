// Draws a Picture (picture.py) as SVG: shapes with roles, coloured by figure.css. It computes nothing: it lights the
// shapes of the current step, hides those that are not there yet, and says what was clicked.

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes, parent) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (parent) parent.append(node);
  return node;
}

function patterns(svg, id) {
  const defs = element("defs", {}, svg);
  for (const role of ["proxy", "P", "D", "text", "muted", "line", "equal", "unequal"]) {
    const hatch = element("pattern", {
      id: `${id}-hatch-${role}`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)",
    }, defs);
    element("line", { y2: 6, class: `stroke ${role}`, "stroke-width": 2.5 }, hatch);
    const head = element("marker", {
      id: `${id}-head-${role}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7,
      markerUnits: "userSpaceOnUse", orient: "auto",
    }, defs);
    element("path", { d: "M0 0L8 4L0 8z", class: `fill ${role}` }, head);
  }
}

function draw(shape, svg, id) {
  const role = shape.role ?? "text";
  const [x, y, a, b] = shape.at;
  if (shape.kind === "text") {
    const node = element("text", {
      x, y, class: `fill ${role}`, "font-size": shape.size ?? 13, "text-anchor": shape.anchor ?? "start",
    }, svg);
    if (shape.bold) node.setAttribute("font-weight", 600);
    node.textContent = shape.label ?? "";
    return node;
  }
  let node;
  if (shape.kind === "rect") {
    node = element("rect", { x, y, width: Math.max(a, 1), height: Math.max(b, 1), rx: 2, class: `${shape.fill ?? "solid"} ${role}` }, svg);
    if (shape.fill === "hatch") node.style.fill = `url(#${id}-hatch-${role})`;
  } else {
    node = element("line", { x1: x, y1: y, x2: a, y2: b, class: `stroke ${role}`, "stroke-width": shape.size ?? 1.2 }, svg);
    if (shape.kind === "arrow") node.setAttribute("marker-end", `url(#${id}-head-${role})`);
  }
  if (shape.label) element("title", {}, node).textContent = shape.label;
  return node;
}

let count = 0;

function render({ model, el }) {
  const id = `pdlab-${count++}`;
  const root = document.createElement("div");
  root.className = "pdlab-figure";
  root.tabIndex = 0;
  root.setAttribute("role", "group");
  const says = document.createElement("output"); // for who hears the page
  const canvas = document.createElement("div");
  root.append(canvas, says);
  el.append(root);
  let drawn = [];

  function redraw() {
    const began = performance.now();
    const picture = model.get("picture");
    canvas.replaceChildren();
    root.setAttribute("aria-label", picture.line);
    const svg = element("svg", { viewBox: `0 0 ${picture.width} ${picture.height}`, "aria-hidden": "true" }, canvas);
    svg.style.maxWidth = `${picture.width}px`; // smaller where the page is
    patterns(svg, id);
    drawn = picture.shapes.map((shape) => {
      const node = draw(shape, svg, id);
      if (shape.name) {
        node.classList.add("chosen-by-click");
        node.dataset.name = shape.name;
      }
      return [shape, node];
    });
    follow();
    root.dataset.milliseconds = (performance.now() - began).toFixed(1);
  }

  function follow() {
    const step = model.get("step");
    const chosen = model.get("chosen");
    for (const [shape, node] of drawn) {
      const there = (shape.since ?? 0) <= step && step <= (shape.until ?? Infinity);
      node.style.display = there ? "" : "none";
      node.classList.toggle("lit", shape.step === step);
      node.classList.toggle("chosen", Boolean(shape.name) && shape.name === chosen);
    }
    if (!root.contains(document.activeElement)) return; // of all that follow one cursor only one speaks
    const lit = drawn.find(([shape]) => shape.step === step && shape.label)?.[0].label;
    says.value = [lit ?? `step ${step + 1} of ${model.get("last") + 1}`, chosen].filter(Boolean).join("; ");
  }

  function choose(name) {
    model.set("chosen", name);
    model.save_changes();
  }

  // The next of the names that are in sight, or the one before.
  function chooseNext(way) {
    const shown = drawn.filter(([shape, node]) => shape.name && !shape.name.startsWith("step ") && !node.style.display);
    const names = [...new Set(shown.map(([shape]) => shape.name))];
    const place = names.indexOf(model.get("chosen"));
    if (names.length) choose(names.at(place < 0 ? Math.min(way, 0) : (place + way) % names.length));
  }

  function go(step) {
    model.set("step", Math.min(Math.max(step, 0), model.get("last")));
    model.save_changes();
  }

  root.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (move) go(model.get("step") + move);
    else if (event.key === "Home") go(0);
    else if (event.key === "End") go(model.get("last"));
    else if (event.key === "n" || event.key === "p") chooseNext(event.key === "n" ? 1 : -1);
    else return;
    event.preventDefault();
    event.stopPropagation(); // or the notebook would move to another cell
  });
  root.addEventListener("click", (event) => {
    const name = event.target.closest("[data-name]")?.dataset.name;
    if (name === undefined) return;
    if (name.startsWith("step ")) go(Number(name.slice(5)));
    else choose(name);
  });
  model.on("change:picture", redraw);
  model.on("change:step", follow);
  model.on("change:chosen", follow);
  redraw();
  return () => {
    model.off("change:picture", redraw);
    model.off("change:step", follow);
    model.off("change:chosen", follow);
  };
}

export default { render };
