"""What holds a run back, and what a change or a bigger machine would bring: no torch needed."""
