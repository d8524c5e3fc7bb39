// On the playground: an image-token model trained to think first, on simple edits, then RL on complex edits.
//
//   retouch train recipes/emu3/sft_think_s__rl_c-playground.jsonnet
local emu3 = import '../lib/emu3_playground.libsonnet';

emu3.stages('emu3-sft_think_s__rl_c', 's', 's', 'c', think=true)
