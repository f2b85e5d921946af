"""What holds a run back, what a change would bring, what a bigger machine would do. Arithmetic, no torch."""
