"""The record of what happened: events as each process wrote them, and the journey of one request made of them.

Nothing here imports vLLM or torch: a trace can be read on any machine.
"""
