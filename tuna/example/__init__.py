"""The example job as the seeds start it, and layers to tune: those of ResNet-50."""
