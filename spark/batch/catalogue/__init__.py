"""What a batch offers: tables, catalogs and jobs, and the roles that may use them."""
