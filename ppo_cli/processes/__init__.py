"""Child processes that may hang, crash, flood their output or write nonsense, and end with the run.

`reaper` is the parent of each: it ends the child with everything that the child has started, and
does so too when the run is killed. `child` asks a child through a channel, within a time limit;
`channel` is the child's end of it. `forks` are copies of a child, one for each episode. `program`
keeps servers, which are asked in other ways.
"""
