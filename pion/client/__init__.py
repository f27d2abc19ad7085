"""Clients of a Pion server. Import the public names from `pion`.

``sync``, ``async_``      `Client` and `AsyncClient`: any command, prefixes as numpy arrays
``calls``, ``tensors``    what they send and make of the answers, as steps both share
``prompt_cache``          `PionPromptCache` for mlx-lm: what to do on a hit, a miss, a mismatch, an outage
``transfer``              one prefix over the wire, for it
``hybrid``                `HybridRetrievalCache`: retrieved chunks, put together for each question
``packs``, ``server_packs``, ``rotate``   chunks in memory, their manifest, chunks on a server; keys at another position
``agreement``             what composing costs, against a full computation
``caches``                between mlx-lm's cache objects and rows
``identity``              the digest that says what K/V belongs to
``namespace``, ``seam``   keys, block hashes, prefixes given as text
``raw``                   the published client's ``resp.call``
``connection``, ``pool``, ``async_pool``, ``address``, ``errors``   what all of them stand on
"""
