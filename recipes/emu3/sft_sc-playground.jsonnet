// On the playground: more supervised learning of image tokens on both kinds of edit, beside RL from the same start.
//
//   retouch train recipes/emu3/sft_sc-playground.jsonnet
local emu3 = import '../lib/emu3_playground.libsonnet';

emu3.supervised('emu3-sft_sc', 'sc', 'sc')
