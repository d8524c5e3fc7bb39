// On the playground: an image-token model trained on simple edits, then on both kinds in a second stage, then RL on simple and
// complex edits.
//
//   retouch train recipes/emu3/sft_sc2stage__rl_sc-playground.jsonnet
local emu3 = import '../lib/emu3_playground.libsonnet';

emu3.stages('emu3-sft_sc2stage__rl_sc', 's', 'sc', 'sc')
