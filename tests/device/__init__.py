"""What a step does on devices, shown without one."""
