#!/bin/bash
# Workers of one job on machines that ssh reaches without a password. docs/how-to/machines.md is its page.
#
#   GC_SERVER=10.0.0.1 workers.sh start JOB HOSTS [COMMAND ...]    COMMAND on each host, by default gc-worker
#   workers.sh list JOB HOSTS                                      does it run, and the last line of its log
#   workers.sh stop JOB HOSTS                                      end it by SIGTERM
#
# HOSTS is a file with a host in each line. All variables GC_* go to the workers: the token and GC_TLS_* as files.
# VENV is the environment of Gradwire on each host, by default /opt/gradwire. All machines need bash 4.4 or newer.
set -u -o pipefail
fail() { echo "workers.sh: $1" >&2 && exit 2; }
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || fail "bash $BASH_VERSION is too old; use 4.4 or newer"
[ $# -ge 3 ] && [[ $1 =~ ^(start|list|stop)$ ]] || fail "expected start, list or stop, JOB and HOSTS, got: $*"
[[ $2 =~ ^[A-Za-z0-9._-]+$ ]] || fail "JOB $2: expected letters, digits, '.', '_' and '-'"
[ "$1" != start ] || [ -n "${GC_SERVER:-}" ] || fail "GC_SERVER is not set; it names the server, as in GC_SERVER=10.0.0.1"
mapfile -t hosts < <(grep -v '^ *\(#\|$\)' "$3")
[ ${#hosts[@]} != 0 ] || fail "$3: expected a host in each line, found none"
double=$(printf '%s\n' "${hosts[@]}" | sort | uniq -d | xargs)
[ -z "$double" ] || fail "$3: $double: a host has one worker of a job; keep one line of it"
action=$1 job=$2 venv=${VENV:-/opt/gradwire}
shift 3
command=("${@:-gc-worker}") files=()
for name in GC_TOKEN_FILE GC_TLS_CA GC_TLS_CERT GC_TLS_KEY; do
    [ "$action" != start ] || [ -z "${!name:-}" ] || files+=("$name=$(cat "${!name}")") || fail "$name=${!name} cannot be read"
done

there() { # on each host, where the command inherits the lock, and holds it as long as it runs
    mask=$(umask) && umask 077 && mkdir -p "$HOME/gradwire/$job" && cd "$HOME/gradwire/$job" || return
    exec 8> lock && flock --timeout 0.5 8 && runs=no || runs=yes # a list, too, holds it for a moment
    case $action-$runs in
        start-no)
            export PATH=$venv/bin:$PATH GC_STATE=$PWD/state
            for each in "${files[@]}"; do echo "${each#*=}" > "${each%%=*}" && export "${each%%=*}=$PWD/${each%%=*}"; done
            [ -d "$venv/bin" ] && command -v "${command[0]}" > /dev/null || { echo "$venv/bin has no ${command[0]}; install it, or set VENV" && return 2; }
            umask "$mask" # a script keeps its own
            rm -f pid && { [ ! -s log ] || mv log log.1; }
            setsid "${command[@]}" > log 2>&1 < /dev/null &
            echo $! > pid && echo "started as $GC_WORKER_ID, log in $PWD/log" ;;
        start-yes) echo "job $job runs here already; stop it, or choose another name" && return 2 ;;
        stop-yes)
            kill -- "-$(cat pid)" && flock --timeout 60 8 || { kill -KILL -- "-$(cat pid)"; flock --timeout 5 8; } ||
                { echo "still runs; see pid and log in $PWD" && return 1; }
            echo ended ;;
        *-no) echo "does not run; $(tail -n 1 log 2>&1)" ;;
        *-yes) echo "runs; $(tail -n 1 log)" ;;
    esac
}

failed=() started=()
for i in "${!hosts[@]}"; do # the script and its tokens go by standard input, which no list of processes shows
    { declare -p action job venv command files && declare -f there
      for name in $(compgen -v GC_); do echo "export $name=${!name@Q}"; done
      echo "export GC_WORKER_ID=w$i; there"; } |
        ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -- "${hosts[i]}" bash 2>&1 | sed "s|^|${hosts[i]}: |" &
    started+=($!)
done
for i in "${!hosts[@]}"; do wait "${started[i]}" || failed+=("${hosts[i]}"); done
[ ${#failed[@]} = 0 ] || fail "${#failed[@]} of ${#hosts[@]} hosts failed, see above: ${failed[*]}; the same command after the repair \
changes nothing on the others"
