// A folder of photographs with instructions (metadata.jsonl beside them), and the judge that needs nothing but the pictures:
// how much of the source is still there, times how near the picture comes to a colour.
{
  tasks(path, held_out=0.1):: { kind: 'folder', path: path, held_out: held_out },
  judge(colour):: { kind: 'photos', colour: colour, combine: { reward: 1 } },
}
