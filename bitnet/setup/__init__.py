"""From what a user asks to a run that begins: its options, its machine, its data. The run itself: `bitnet.train`."""
