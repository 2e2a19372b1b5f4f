"""The HTTP server on top of the engine: OpenAI's API (`openai.py`), contexts, limits, metrics and the page."""
