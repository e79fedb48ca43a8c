/* SPDX-License-Identifier: Apache-2.0 */
/* launch/membership.pml: how launchers agree on epochs (membership.h, agreement.h), as a model that Spin checks
 * exhaustively.
 *
 *   tests/hosts/check_membership.sh lockstep/launch/membership.pml
 *
 * N machines make two decisions, one after the other: who the members of epoch 1 are, then of epoch 2. Any machine may
 * suspect any other at any time, rightly or not: it proposes any set of members that it is in itself. Any machine may end at
 * any point, which is the same as doing nothing any more. A request may come late, more than once or never; an answer may
 * get lost. Of an even number of members the arbiter has a vote as well.
 *
 * Checked: no two machines learn different members for the same epoch, so no two sides both go on; and who goes on with half
 * of the members or fewer has the arbiter's vote.
 *
 * -DHALF: a proposer is content with half of the votes. -DFORGET: it does not propose what a voter has accepted before. The
 * model has to find an error in both.
 */
#ifndef N
#define N 3
#endif
#ifndef DECISIONS
#define DECISIONS 2
#endif
#ifndef TRIES
#define TRIES 1
#endif
#define BALLOTS (TRIES * N) /* b belongs to machine b % N; 0 stands for none, so they are counted from 1 */
#define ARBITER N
#define VOTERS (N + 1)
#define ALL ((1 << N) - 1)

#define AT(decision, voter) ((decision) * VOTERS + (voter))
#define ASKED(decision, ballot) ((decision) * (BALLOTS + 1) + (ballot))

byte promised[DECISIONS * VOTERS];
byte accepted[DECISIONS * VOTERS];
byte value[DECISIONS * VOTERS];
byte asked[DECISIONS * (BALLOTS + 1)]; /* "accept": the value, for whoever hears of it and whenever */
byte votes[DECISIONS * (BALLOTS + 1)]; /* who has accepted it, as a set */
byte members[DECISIONS + 1];           /* of the model alone: what was decided first */
byte epoch[N];                         /* which each machine is in */

#define HAS(set, machine) (((set) >> (machine)) & 1)
#define COUNT3(set) (HAS(set, 0) + HAS(set, 1) + HAS(set, 2) + HAS(set, 3))
#define IS_EVEN(set) (COUNT3(set) % 2 == 0)

/* Of the machines, and of the arbiter where their number is even. */
#define MAY_VOTE(voter, of) ((voter) == ARBITER -> IS_EVEN(of) : HAS(of, voter))

#ifdef HALF
#define ENOUGH(set, of) (2 * COUNT3(set) >= COUNT3(of))
#else
#define ENOUGH(set, of) (COUNT3(set) >= COUNT3(of) / 2 + 1)
#endif

inline take_vote(voter) {
  atomic {
    if
    :: MAY_VOTE(voter, mine) && ballot >= promised[AT(next, voter)] && (voter == ARBITER || epoch[voter % N] == next) ->
       promised[AT(next, voter)] = ballot;
       promises = promises | (1 << voter);
       if
       :: accepted[AT(next, voter)] > newest -> newest = accepted[AT(next, voter)]; found = value[AT(next, voter)]
       :: else
       fi
    :: true /* it does not hear, does not answer, or the answer is lost */
    fi;
    peer++
  }
}

/* The set of machines in `mine`, with this one, that it would go on with. */
inline choose_wish() {
  wish = 1 << me;
  peer = 0;
  do
  :: peer == N -> break
  :: else ->
     if
     :: HAS(mine, peer) -> wish = wish | (1 << peer)
     :: true
     fi;
     peer++
  od
}

inline propose() {
  do
  :: peer == VOTERS -> break
  :: else -> take_vote(peer)
  od;
  atomic {
    if
    :: ENOUGH(promises, mine) && epoch[me] == next ->
       choose_wish();
#ifndef FORGET
       if
       :: newest > 0 -> wish = found
       :: else
       fi;
#endif
       asked[ASKED(next, ballot)] = wish
    :: else
    fi;
    promises = 0; newest = 0; found = 0; wish = 0; peer = 0; ballot = 0
  }
}

#define CAN_ACCEPT(voter, number)                                                    \
  (asked[ASKED(next, number)] != 0 && (number) >= promised[AT(next, voter)] &&       \
   !HAS(votes[ASKED(next, number)], voter))

/* One that any proposer has sent at any time. */
inline hear_request(voter) {
  atomic {
    next < DECISIONS && ((voter) != ARBITER || IS_EVEN(mine)) ->
    ballot = 1;
    do
    :: ballot > BALLOTS -> break
    :: ballot <= BALLOTS && CAN_ACCEPT(voter, ballot) ->
       promised[AT(next, voter)] = ballot;
       accepted[AT(next, voter)] = ballot;
       value[AT(next, voter)] = asked[ASKED(next, ballot)];
       votes[ASKED(next, ballot)] = votes[ASKED(next, ballot)] | (1 << (voter));
       if
       :: ENOUGH(votes[ASKED(next, ballot)], mine) -> /* decided, whether anybody has seen it or not */
          assert(members[next + 1] == 0 || members[next + 1] == asked[ASKED(next, ballot)]);
          members[next + 1] = asked[ASKED(next, ballot)]
       :: else
       fi;
       break
    :: ballot <= BALLOTS -> ballot++
    od;
    ballot = 0
  }
}

proctype machine(byte me) {
  byte next = 0;       /* the decision that this machine has not heard of */
  byte mine = ALL;     /* the members of its epoch */
  byte tried = 0;      /* how often it has proposed for it */
  byte ballot, promises, newest, found, wish, peer;
end: /* it may stop anywhere */
  do
  :: atomic { next < DECISIONS && tried < TRIES -> tried++; ballot = me + 1 + (tried - 1) * N; peer = 0 }
     propose()
  :: hear_request(me)
  :: hear_request(ARBITER) /* whose memory outlives every machine */
  :: atomic { /* what is decided is told by those who have seen the votes */
       next < DECISIONS && members[next + 1] != 0 ->
       next++;
       mine = members[next];
       tried = 0;
       epoch[me] = next;
       if
       :: !HAS(mine, me) -> break /* the others go on without it */
       :: else
       fi
     }
  od
}

init {
  byte m = 0;
  atomic {
    members[0] = ALL;
    do
    :: m < N -> run machine(m); m++
    :: else -> break
    od
  }
}
