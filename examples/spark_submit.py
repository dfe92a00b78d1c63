r"""cdcpipe-spark as an application for spark-submit, with all its commands and options.

    spark-submit --master spark://spark:7077 \
        --packages io.delta:delta-spark_4.2_2.13:4.4.0,io.delta:delta-storage:4.4.0 \
        examples/spark_submit.py run -d shop -S shop_cdc --publication shop -c \
        --staging /srv/shared/staging --warehouse /srv/shared/lake

The driver runs where spark-submit does (--deploy-mode client, the default), and cdcpipe is installed there. Executors get
cdcpipe's code from it; they need Python with pyspark, pyarrow, numpy and adbc-driver-postgresql, at PYSPARK_PYTHON.
Master, jars and settings are spark-submit's; what it leaves open is set as for cdcpipe-spark.
"""

from spark_sink.__main__ import main

if __name__ == "__main__":
    main()
