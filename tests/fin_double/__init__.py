"""A test double of AMD's program `fin`, and the ROCm tree that Tuna finds it in."""
