"""Run by the python of vllm_env.sh, never by ours: serves the load of its first line once for each
further line, and answers with its own times.

    {"model": folder, "requests": [[prompt ids, max tokens], …]}  ->  {}
    {}                                                             ->  {"wall_s", "cpu_s", "tokens"}
"""

import json
import os
import sys
import time


def main() -> None:
    # Whatever vLLM prints must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    load = json.loads(sys.stdin.readline())

    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(1)
    longest = max(len(prompt) + wanted for prompt, wanted in load["requests"])
    llm = LLM(
        model=load["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=longest + 16,
        max_num_seqs=len(load["requests"]),
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in load["requests"]]
    sampling = [
        SamplingParams(temperature=1.0, max_tokens=wanted, ignore_eos=True, detokenize=False)
        for _, wanted in load["requests"]
    ]

    def answer(message: dict) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    answer({})
    for _ in sys.stdin:
        llm.reset_prefix_cache()
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        answer(
            {
                "wall_s": time.perf_counter() - wall_s,
                "cpu_s": time.process_time() - cpu_s,
                "tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
            }
        )


if __name__ == "__main__":
    main()
