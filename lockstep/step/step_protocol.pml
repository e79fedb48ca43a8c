/* SPDX-License-Identifier: Apache-2.0 */
/* step/step_protocol.pml: the barriers of a training step with shared parameters (step_agreement.h,
 * published.cc) as a model that Spin checks exhaustively.
 *
 *   tests/shm/check_protocol.sh lockstep/step/step_protocol.pml
 *
 * N ranks make ROUNDS rounds of: forward and backward, publish, take, update. Any rank may leave out any step() by
 * itself. Every barrier announces what it belongs to, in the line of its parity; whoever finds another announcement than
 * its own is refused and ends.
 *
 * Stores are seen late, as on machines with a weak memory order: a store goes into the rank's store buffer, from which
 * stores reach memory in any order. Only a flag, which is stored with release order, waits for all that were stored
 * before it. A rank sees its own stores at once.
 *
 * Checked: an update reads the rows and gradients of its own exchange; forward finds every slice of the parameters in
 * the same version; where a rank leaves out a step, no rank has updated anything in it; a barrier is passed by all
 * ranks or by none; every rank ends.
 */
#ifndef N
#define N 2
#endif
#define ROUNDS 3

#define BACKWARD 1
#define STEP 2
#define STEP_END 3

/* Variables of a rank, each in memory and, while its store is under way, in the store buffer. */
#define LINE(parity) (parity)       /* the announcement: phase and number */
#define ROW(parity) (2 + (parity))  /* of the publication table */
#define GRADIENT 4
#define SLICE 5                     /* of the parameters: how often it was updated */
#define FLAG(parity) (6 + (parity)) /* who sees it, sees all that was stored before */
#define VARIABLES 8

#define AT(rank, variable) ((rank) * VARIABLES + (variable))
#define ANNOUNCED(phase, number) ((phase) * 16 + (number))

byte memory[N * VARIABLES];
byte buffer[N * VARIABLES];   /* 0: nothing under way */
byte ended;                   /* ranks */
bool has_ended[N];

/* Of the model alone. */
bool updated[ROUNDS + 1];     /* after exchange e, by any rank */
bool left_out[ROUNDS + 1];    /* the step() after exchange e, by any rank */
bool passed[3 * ROUNDS + 1];  /* barrier number s, by any rank */
bool refused[3 * ROUNDS + 1];

/* Two stores to one variable stay in order. */
inline store(variable, value) { buffer[AT(me, variable)] == 0; buffer[AT(me, variable)] = value }

#define SEEN(rank, variable) \
  ((rank) == me && buffer[AT(me, variable)] != 0 -> buffer[AT(me, variable)] : memory[AT(rank, variable)])

#define UNDER_WAY(variable) (buffer[AT(me, variable)] != 0)
#define DATA_UNDER_WAY                                                                             \
  (UNDER_WAY(LINE(0)) || UNDER_WAY(LINE(1)) || UNDER_WAY(ROW(0)) || UNDER_WAY(ROW(1)) ||           \
   UNDER_WAY(GRADIENT) || UNDER_WAY(SLICE))

inline drained(variable) { memory[AT(me, variable)] = buffer[AT(me, variable)]; buffer[AT(me, variable)] = 0 }

/* One rank's store buffer: what is in it reaches memory at any time, a flag only after everything else. */
proctype drain(byte me) {
  do
  :: atomic { UNDER_WAY(LINE(0)) -> drained(LINE(0)) }
  :: atomic { UNDER_WAY(LINE(1)) -> drained(LINE(1)) }
  :: atomic { UNDER_WAY(ROW(0)) -> drained(ROW(0)) }
  :: atomic { UNDER_WAY(ROW(1)) -> drained(ROW(1)) }
  :: atomic { UNDER_WAY(GRADIENT) -> drained(GRADIENT) }
  :: atomic { UNDER_WAY(SLICE) -> drained(SLICE) }
  :: atomic { UNDER_WAY(FLAG(0)) && !DATA_UNDER_WAY -> drained(FLAG(0)) }
  :: atomic { UNDER_WAY(FLAG(1)) && !DATA_UNDER_WAY -> drained(FLAG(1)) }
  :: ended == N -> break
  od
}

/* Announces, waits for all, compares. A mismatch ends this rank. */
inline barrier(phase, number) {
  sequence++;
  store(LINE(sequence % 2), ANNOUNCED(phase, number));
  store(FLAG(sequence % 2), sequence);
  peer = 0;
  do
  :: peer == N -> break
  :: else ->
     if
     :: SEEN(peer, FLAG(sequence % 2)) == sequence -> peer++
     :: has_ended[peer] && buffer[AT(peer, FLAG(sequence % 2))] == 0 &&
        memory[AT(peer, FLAG(sequence % 2))] != sequence -> goto gone /* PeerLost */
     fi
  od;
  atomic {
    differs = false;
    peer = 0;
    do
    :: peer == N -> break
    :: else -> differs = differs || SEEN(peer, LINE(sequence % 2)) != ANNOUNCED(phase, number); peer++
    od;
    if
    :: differs -> refused[sequence] = true
    :: else -> passed[sequence] = true
    fi;
    assert(!(refused[sequence] && passed[sequence]))
  };
  if
  :: differs -> goto gone
  :: else
  fi
}

proctype rank(byte me) {
  byte exchange = 0;   /* number of this rank's backward() */
  byte step = 0;       /* number of its last step() */
  byte sequence = 0;   /* number of its last barrier */
  byte peer = 0;
  bool differs = false;
  do
  :: exchange == ROUNDS -> break
  :: else ->
     exchange++;
     /* forward: all slices are those of the last step */
     atomic {
       peer = 0;
       do
       :: peer == N -> break
       :: else -> assert(SEEN(peer, SLICE) == step); peer++
       od
     };
     /* backward, publish */
     store(GRADIENT, exchange);
     store(ROW(exchange % 2), exchange);
     barrier(BACKWARD, exchange);
     /* samples and losses of all ranks */
     peer = 0;
     do
     :: peer == N -> break
     :: else -> assert(SEEN(peer, ROW(exchange % 2)) == exchange); peer++
     od;
     if
     :: d_step { left_out[exchange] = true; assert(!updated[exchange]) }
     :: step++;
        barrier(STEP, step);
        /* take, update */
        peer = 0;
        do
        :: peer == N -> break
        :: else ->
           assert(SEEN(peer, ROW(exchange % 2)) == exchange);
           assert(SEEN(peer, GRADIENT) == exchange);
           peer++
        od;
        store(SLICE, step);
        d_step { updated[exchange] = true; assert(!left_out[exchange]) };
        barrier(STEP_END, step)
     fi
  od;
gone:
  atomic { has_ended[me] = true; ended++ }
}

init {
  byte r = 0;
  atomic {
    do
    :: r < N -> run rank(r); run drain(r); r++
    :: else -> break
    od
  }
}
