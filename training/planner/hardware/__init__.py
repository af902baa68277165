"""Models of devices and networks for the planner: data sheets, matrix products, links, the current machine."""
