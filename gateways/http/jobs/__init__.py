"""Jobs over HTTP: requests that Titanic stores, and whose replies it keeps."""
