// On the playground: more supervised learning of image tokens on simple edits, beside RL from the same start.
//
//   retouch train recipes/emu3/sft_s-playground.jsonnet
local emu3 = import '../lib/emu3_playground.libsonnet';

emu3.supervised('emu3-sft_s', 's', 's')
