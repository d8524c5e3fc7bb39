// The curriculum of the TRL writer script's text-to-image variant (run_8gpu_qwen_image.sh): writer-grpo-published on MMMG's
// training set, in five phases of 100 steps. Each phase adds a fifth of the pairs of level and discipline, the easiest first. 8
// GPUs with 141 GB (H200).
//
//   hf download MMMGBench/MMMG_Train --repo-type dataset --local-dir MMMG_Train
//   retouch data convert mmmg MMMG_Train --out lists --stages 5
//   export OPENAI_API_KEY=...
//   retouch launch --nproc 8 recipes/qwen-image/writer-grpo-published-mmmg.jsonnet
//
// For the source's order, put its mmmg_difficulty_summary.json into MMMG_Train before the conversion; without it, the order is that
// of the levels. A phase continues with the weights and the optimizer state of the previous one, as in the source.
//
// The reward is the knowledge fidelity of MMMG and the quality of the image, with the weights of the source's script. In the first
// version of the source a judge scored the quality, as here. In the last version the reward is the fidelity times MMMG's
// readability, which is not included. Off by default, as in the source: a judge's score of the response's text, which its last
// version combines with the weight 0.5: add `text: { kind: 'completion_quality', judge: judge }` to `rewards`, and
// `combine: '0.5 * mmmg/fidelity + 0.5 * text/completion'`.
//
// A healthy run looks like that of writer-grpo-published.
// - `reward/mmmg/fidelity` may fall at steps 100, 200, 300 and 400, where harder tasks are added, and rises between them.
// - All phases are evaluated on the held-out tasks of the first phase, the easiest ones, so the held-out scores of all phases can be
//   compared. `retouch eval RUN --data lists/stage-5.jsonl` scores tasks of all levels, most of which were trained on.
local judges = import '../lib/judges.libsonnet';
local judge = judges.endpoint('gpt-4o');
local stage(number) = {
  kind: 'prompts',
  path: 'lists/stage-%d.jsonl' % number,
  held_out: 0.05,
  tags: ['level', 'discipline'],
};

(import 'writer-grpo-published.jsonnet') {
  name: 'qwen-image-writer-grpo-published-mmmg',
  steps: null,
  data: stage(1),
  reward: {
    kind: 'several',
    rewards: {
      mmmg: { kind: 'mmmg', judge: judge },
      looks: { kind: 'aspects', judge: judge, aspects: ['quality'], n_evals: 3 },
    },
    combine: '0.5 * mmmg/fidelity + 0.5 * looks/quality',
  },
  phases: [
    { name: 'stage-%d' % number, steps: 100, data: stage(number), keep_optimizer: number > 1 }
    for number in std.range(1, 5)
  ],
}
