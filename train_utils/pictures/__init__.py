"""Pictures that a run draws: boxes on images, contact sheets, charts."""
