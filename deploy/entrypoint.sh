#!/bin/bash
# Runs the command; or an executor, which Spark starts on Kubernetes with the one argument `executor`.
set -e
if [ "$1" != executor ]; then
    exec "$@"
fi
options=()
for ((number = 0; ; number++)); do # Spark passes Java's options as SPARK_JAVA_OPT_0, SPARK_JAVA_OPT_1, …
    name="SPARK_JAVA_OPT_$number"
    [ -n "${!name+x}" ] || break
    options+=("${!name}")
done
# Spark mounts its settings, if there are any, in SPARK_CONF_DIR, and unpacks shipped files in the current directory.
exec "${JAVA_HOME:+$JAVA_HOME/bin/}java" "${options[@]}" "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" \
    -cp "${SPARK_CONF_DIR:-/opt/spark/conf}:$SPARK_HOME/jars/*:$SPARK_CLASSPATH:$PWD" \
    org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
    --driver-url "$SPARK_DRIVER_URL" --executor-id "$SPARK_EXECUTOR_ID" --cores "$SPARK_EXECUTOR_CORES" \
    --app-id "$SPARK_APPLICATION_ID" --hostname "$SPARK_EXECUTOR_POD_IP" \
    --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" --podName "$SPARK_EXECUTOR_POD_NAME"
