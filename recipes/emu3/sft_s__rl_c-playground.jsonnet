// On the playground: an image-token model trained on simple edits, then RL on complex edits.
//
//   retouch train recipes/emu3/sft_s__rl_c-playground.jsonnet
local emu3 = import '../lib/emu3_playground.libsonnet';

emu3.rl('emu3-sft_s__rl_c', 's', 'c')
