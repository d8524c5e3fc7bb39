// On the playground: continued supervised learning of image tokens on simple edits, to compare with RL from the same start.
//
//   retouch train recipes/emu3/sft_s-playground.jsonnet
local emu3 = import '../lib/emu3_playground.libsonnet';

emu3.supervised('emu3-sft_s', 's', 's')
