// A folder of photographs with instructions in a metadata.jsonl, and a reward that needs only the images: how much of the source is
// preserved, times how close the image is to a colour.
{
  tasks(path, held_out=0.1):: { kind: 'folder', path: path, held_out: held_out },
  judge(colour):: { kind: 'photos', colour: colour, combine: { reward: 1 } },
}
