// A folder of photographs with instructions in a metadata.jsonl, and two rewards for it.
{
  tasks(path, held_out=0.1):: { kind: 'folder', path: path, held_out: held_out },

  // A reward that needs no model: how close the image is to the photograph in black and white.
  black_and_white:: { kind: 'grade', saturation: 0 },

  // For full-size models: PickScore, which predicts the image that people prefer for the instruction, and how much of the source is
  // preserved in the features of DINOv2. One point of PickScore counts as much as a tenth of the preservation. Both models take 4.3
  // GB in fp32; `device: 'cpu'` keeps them out of the GPU's memory.
  preferred(device=null):: {
    kind: 'several',
    rewards: {
      pick: { kind: 'pickscore', device: device },
      source: { kind: 'dino', device: device },
    },
    combine: '0.1 * pick/pickscore + source/preservation',
  },
}
