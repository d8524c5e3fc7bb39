// On the playground: continued supervised learning of image tokens on both kinds of edits, to compare with RL from the same start.
//
//   retouch train recipes/emu3/sft_sc-playground.jsonnet
local emu3 = import '../lib/emu3_playground.libsonnet';

emu3.supervised('emu3-sft_sc', 'sc', 'sc')
