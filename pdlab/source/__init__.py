"""Where it happened: symbols and statements in the installed vLLM, and how they drifted between its versions."""
