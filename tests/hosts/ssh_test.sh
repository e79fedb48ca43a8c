#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `lockstep run --hosts` over real sshd on three hosts: 2 + 1 + 2 ranks train as one does. The secret reaches the ranks, and ps shows
# it nowhere. All end when a rank is killed, by Ctrl-C, and when the caller is killed. Hosts that can't run the job are named before
# anything is started. As root. Everything is in namespaces of this script's own.
#
#   ssh_test.sh LOCKSTEP
set -euo pipefail
source "$(dirname "$0")/hosts.sh"
as_root_in_own_namespaces "$0" "$@"
lockstep=$1
[ -x /usr/sbin/sshd ] || fail "no sshd: tools/setup.sh check installs it"
make_hosts n1 n2 n3
mkdir -m 0755 /run/sshd  # of its children without privileges
echo 'root:*:19000::::::' >/run/shadow  # a locked root could not log in
mount --bind /run/shadow /etc/shadow

ssh-keygen -q -t ed25519 -N '' -f "$work/user"
cat >"$work/sshd_config" <<CONFIG
AuthorizedKeysFile $work/user.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
CONFIG
# "old" is n3 with another lockstep; at "closed" no sshd listens; "silent" is nobody's address.
cat >"$work/ssh_config" <<CONFIG
Host old
  HostName n3
  Port 23
Host closed
  HostName n2
  Port 24
Host silent
  HostName 10.77.0.99
Host *
  User root
  IdentityFile $work/user
  IdentitiesOnly yes
  UserKnownHostsFile $work/known_hosts
  HostKeyAlgorithms ssh-ed25519
CONFIG
printf '#!/bin/sh\necho lockstep 0.0.1\n' >"$work/old_lockstep"
chmod +x "$work/old_lockstep"
start_sshd() {  # HOST PORT COMMAND...: the command runs sshd
  on_host "$1" "${@:3}" /usr/sbin/sshd -D -e -f "$work/sshd_config" -h "$work/key-$1" -p "$2" 2>>"$work/sshd.log" &
}
for host in n1 n2 n3; do
  ssh-keygen -q -t ed25519 -N '' -f "$work/key-$host"
  echo "$host,[$host]:23 $(cut -d' ' -f1,2 "$work/key-$host.pub")" >>"$work/known_hosts"
  start_sshd "$host" 22 env
done
start_sshd n3 23 sh -c 'mount --bind "$0" "$1" && shift && exec "$@"' "$work/old_lockstep" "$lockstep"

until_true() {  # SECONDS COMMAND...
  local give_up=$((SECONDS + $1))
  until "${@:2}"; do
    [ $SECONDS -lt $give_up ] || fail "not within $1 s: ${*:2}; $(tail -n 50 "$work"/*.log)"
    sleep 0.1
  done
}
answers() { ssh -F "$work/ssh_config" -o BatchMode=yes "$1" true 2>>"$work/ssh.log"; }
for host in n1 n2 n3 old; do until_true 30 answers $host; done
export LOCKSTEP_SSH="ssh -F $work/ssh_config"
printf '# three\nn1 slots=2\nn2\t# one\nn3 slots=2\n' >"$work/hosts"

# ---- Training
train=("$lockstep" train --threads 1 --batch-size 37 --quiet --timeout 60 --max-steps 3)
"${train[@]}" --metrics "$work/one.jsonl"
"$lockstep" run --hosts "$work/hosts" -- "${train[@]}" --metrics "$work/many.jsonl"
has_losses_of_one_rank many 3 1e-4
tail -n 1 "$work/many.jsonl" >"$work/end"
grep -Eq '"ranks": ?5\b' "$work/end" || fail "not five ranks: $(cat "$work/end")"
echo "2 + 1 + 2 ranks have the losses of one"

# ---- Hosts that can't run it
code=0
"$lockstep" run --hosts n1,old,closed,silent:2 -- touch "$work/started" >"$work/refused.log" 2>&1 || code=$?
[ $code -eq 1 ] || fail "code $code: $(cat "$work/refused.log")"
for words in '^    old: lockstep 0.0.1$' '^    closed: .*refused' '^    silent: '; do
  grep -q "$words" "$work/refused.log" || fail "no line '$words': $(cat "$work/refused.log")"
done
! grep -q '^    n1: ' "$work/refused.log" || fail "n1 can run it: $(cat "$work/refused.log")"
[ ! -e "$work/started" ] || fail "a rank was started"
echo "hosts that can't run the job are named"

# ---- Ways to end
cat >"$work/rank" <<RANK
#!/bin/sh
cat "\$LOCKSTEP_SECRET_FILE" >"$work/secret.\$RANK"
echo "here is \$VALUE"
echo \$\$ >"$work/up/\$(hostname).\$RANK"
exec sleep 98765
RANK
chmod +x "$work/rank"
ranks_up() { [ "$(ls "$work/up" | wc -l)" -eq 5 ]; }
nobody_is_left() { ! pgrep -f '^sleep 98765|lockstep run' >/dev/null; }
begin() {
  rm -rf "$work/up"
  mkdir "$work/up"
  VALUE="it's 1 \$2" env --default-signal=INT "$lockstep" run --hosts "$work/hosts" --export VALUE --grace 2 -- "$work/rank" \
    >"$work/job.log" 2>&1 &
  job=$!
  until_true 60 ranks_up
}
ends_with() {  # CODE
  local code=0 began=$SECONDS
  wait $job || code=$?
  [ $code -eq "$1" ] || fail "code $code, not $1: $(cat "$work/job.log")"
  [ $((SECONDS - began)) -le 15 ] || fail "ended after $((SECONDS - began)) s"
  until_true 15 nobody_is_left
}

begin
ps axeww >"$work/ps.txt"
grep -q 'LOCKSTEP_SECRET_FILE=/proc/' "$work/ps.txt" || fail "ps shows no variables"
grep -Eqx '[0-9a-f]{64}' "$work/secret.0" || fail "no secret: $(cat "$work/secret.0")"
for rank in 1 2 3 4; do cmp "$work/secret.0" "$work/secret.$rank"; done
! grep -Fq -f "$work/secret.0" "$work/ps.txt" "$work/job.log" || fail "the secret is shown"
kill -KILL "$(cat "$work"/up/n2.*)"
ends_with 137
grep -q '^lockstep: host n2 exited with code 137$' "$work/job.log" || fail "n2 is not named: $(cat "$work/job.log")"
for host in n1 n2 n3; do
  grep -Eq "^\[$host rank [0-4]\] here is it's 1 \\\$2\$" "$work/job.log" || fail "no line of $host: $(cat "$work/job.log")"
done
! grep -Ev '^\[n[123]( rank [0-4])?\] |^lockstep: ' "$work/job.log" || fail "lines without a host"
echo "a rank was killed: all have ended"

begin
kill -INT $job
ends_with 130
begin
kill -KILL $job
ends_with 137
echo "interrupted, and killed: all have ended"
