"""Devices and networks as the planner knows them: data sheets, matrix products, links, the machine at hand."""
