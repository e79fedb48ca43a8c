/* SPDX-License-Identifier: Apache-2.0 */
/* collective/shm/protocol.pml: the flags of the shared-memory core as a model that Spin checks exhaustively.
 *
 *   tests/shm/check_protocol.sh lockstep/collective/shm/protocol.pml
 *
 * N ranks make ROUNDS one-shot collectives: each writes its slot of this round's parity, raises `arrived`, waits for
 * the others, and reads their slots. One rank may die at any step; a waiter that finds a peer dead poisons,
 * and whoever waits and finds poison gives up. Sleeping is modelled as in flag.h: a sleeper counts itself in and looks
 * again before it sleeps, a raiser stores and then looks for sleepers. A sleep may also end by itself (its slice is
 * over) only if somebody died: so that a lost wake-up shows as a deadlock.
 *
 * Checked: no slot is overwritten before all have read it; every reader finds the data of its own round; no wake-up is
 * lost; every rank ends, having finished all rounds or having seen poison.
 */
#ifndef N
#define N 3
#endif
#define ROUNDS 3

#define SLOT(rank, round) slot[(rank) * 2 + (round) % 2]
#define ARRIVED(rank, round) arrived[(rank) * 2 + (round) % 2]

byte slot[2 * N];      /* the round that the data belongs to */
byte arrived[2 * N];   /* the flag of an announcement */
byte sleepers[2 * N];  /* of that flag */
bool wake[N];          /* this rank's sleep is over */
byte asleep_on[N];     /* the flag, plus one; 0: awake */
bool dead[N];
bool poison;
byte deaths;

inline maybe_die() {
  if
  :: deaths == 0 -> deaths++; dead[me] = true; goto gone
  :: true
  fi
}

inline raise(flag, value) {
  arrived[flag] = value;          /* sequentially consistent store ... */
  if                              /* ... before this load */
  :: sleepers[flag] > 0 ->
     atomic {
       i = 0;
       do
       :: i < N -> if :: asleep_on[i] == flag + 1 -> wake[i] = true :: else fi; i++
       :: else -> break
       od
     }
  :: else
  fi
}

/* The kernel compares and goes to sleep in one step, as futex does. */
inline sleep_while(flag, seen) {
  sleepers[flag]++;
  atomic { if :: arrived[flag] == seen -> asleep_on[me] = flag + 1; wake[me] = false :: else fi }
  if
  :: asleep_on[me] != 0 -> (wake[me] || deaths > 0 || poison); asleep_on[me] = 0
  :: else
  fi;
  sleepers[flag]--
}

inline wait_for(peer, flag, value) {
  do
  :: arrived[flag] == value -> break
  :: else ->
     seen = arrived[flag];
     if
     :: seen == value -> break
     :: else
     fi;
     if
     :: dead[peer] -> poison = true
     :: else
     fi;
     if
     :: poison -> goto gave_up
     :: else
     fi;
     sleep_while(flag, seen)
  od
}

proctype rank(byte me) {
  byte round = 1;
  byte peer, seen, i;
  do
  :: round > ROUNDS -> break
  :: else ->
     maybe_die();
     SLOT(me, round) = round;
     maybe_die();
     raise(me * 2 + round % 2, round);
     peer = 0;
     do
     :: peer == N -> break
     :: peer == me -> peer++
     :: else -> wait_for(peer, peer * 2 + round % 2, round); peer++
     od;
     maybe_die();
     d_step {
       peer = 0;
       do
       :: peer == N -> break
       :: else -> assert(SLOT(peer, round) == round); peer++
       od
     };
     round++
  od;
  goto gone;
gave_up:
  assert(poison && deaths > 0);
gone:
  skip
}

init {
  byte r = 0;
  atomic {
    do
    :: r < N -> run rank(r); r++
    :: else -> break
    od
  }
}
