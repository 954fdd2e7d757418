"""Python jobs for the tests of catalogues, which use tables in every way that Python has."""


def nothing(spark):
    """Uses no table."""
    return spark.version


def columns(spark, name: str):
    """The columns of a table, for which Spark runs no job once it knows the schema."""
    return spark.table(name).columns


def count(spark, name: str):
    """The rows of a table, as four methods see it."""
    return [
        spark.table(name).count(),
        spark.sql(f"SELECT count(*) FROM {name}").first()[0],
        spark.read.option("any", "thing").table(name).count(),
        spark.sql("SELECT count(*) FROM IDENTIFIER(:t)", {"t": name}).first()[0],
    ]


def by_parameter(spark, name: str):
    """The rows of a table that only the parameter of a query names."""
    return spark.sql("SELECT count(*) AS n FROM IDENTIFIER(:t)", {"t": name})


def through(spark, name: str):
    """The rows of a table, from the session that a DataFrame knows."""
    return spark.range(1).sparkSession.table(name).count()


def exists(spark, name: str):
    """Whether Spark knows a table."""
    return spark.catalog.tableExists(name)


def views(spark):
    """The names of all tables."""
    return sorted(each.name for each in spark.catalog.listTables() if each.isTemporary)


def own(spark, name: str):
    """A view of its own, under a name of the catalogue."""
    spark.range(7).createOrReplaceTempView(name)
    return spark.table(name).count()


def use(spark, catalog: str):
    """Changes the current catalog."""
    spark.sql(f"USE {catalog}")
    return spark.catalog.currentCatalog()


def execute(spark, sql: str):
    """Runs a command."""
    spark.sql(sql)


def append(spark, name: str, ids: list[int]):
    """Appends rows to a table of a catalog, from a DataFrame."""
    spark.createDataFrame([(each, f"order {each}") for each in ids], "id long, text string").writeTo(name).append()
