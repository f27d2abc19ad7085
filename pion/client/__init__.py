"""Clients of a Pion server. Import the public names from `pion`.

``prompt_cache``  `PionPromptCache`, the cache for mlx-lm: what to do on a hit, a miss, a mismatch, an outage
``transfer``      one prefix over the wire
``caches``        between mlx-lm's cache objects and rows
``identity``      the digest that says what K/V belongs to
``namespace``     keys and block hashes
``seam``          prefixes given as text
``link``          the prompt cache's connection
"""
