"""What the page is told: a file a subject. A feed is a function of a `Run`, or of the run's folder,
that gives JSON values; big ones are columns, not objects."""
