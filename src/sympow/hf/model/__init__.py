"""sympow's own model in transformers.

`modeling.py` has the models, `config.py` their config, `cache.py` their past, and `conversion.py` the way from and to
`sympow.GPT`.
"""
