"""Clients of a Pion server. Import the public names from `pion`.

``sync``, ``async_``      `Client` and `AsyncClient`: any command, prefixes as numpy arrays
``calls``, ``tensors``    what they send and make of the answers, as steps both share
``prompt_cache``          `PionPromptCache` for mlx-lm: what to do on a hit, a miss, a mismatch, an outage
``transfer``              one prefix over the wire, for it
``hybrid``                `HybridRetrievalCache`: retrieved chunks, put together for each question
``chunks``, ``packs``, ``server_packs``   what it knows; chunks in memory and their manifest; chunks on a server
``rotate``                keys at another position, exactly
``attend``, ``attend_lanes``, ``attend_methods``   questions about attention, and which way they take
``stage2``, ``resident``, ``prefix_cache``, ``attention_parts``   a prefix that somebody else attends to
``attention_patch``, ``mlx_seam``   mlx-lm's attention, replaced; whether it can be
``agreement``             what composing costs, against a full computation
``caches``                between mlx-lm's cache objects and rows
``identity``              the digest that says what K/V belongs to
``namespace``, ``seam``   keys, block hashes, prefixes given as text
``raw``                   the published client's ``resp.call``
``connection``, ``pool``, ``async_pool``, ``address``, ``errors``   what all of them stand on
"""
