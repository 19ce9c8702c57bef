"""Plan the blocks of a training loop that is rehearsed: record them there, compose a rank's step of them, plan that."""
