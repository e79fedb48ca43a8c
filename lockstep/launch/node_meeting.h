// SPDX-License-Identifier: Apache-2.0
// launch/node_meeting.h: how the launchers of several machines agree on who is which machine, when nobody told them:
// torchrun's dynamic rendezvous (--rdzv-backend c10d).
//
// Flow:    `lockstep run --rdzv-endpoint` on each machine -> here -> LaunchOptions, machines.h
// Owns:    the listening socket at the endpoint, until all have their answer; then rank 0 listens there
// Threads: main's
// Ranks:   before there are any; one call per machine
//
// The launcher that can listen at the endpoint is machine 0. The others connect and say how many ranks they start and
// where they can be reached; they are numbered as they come. Once `most` machines are there, or `least` and nobody new for
// `last_call`, machine 0 tells each of them the first epoch (epoch.h). A launcher that has gone away by then is left out.
// Texts are lines, through channels that ask for the job's secret (secured_channel.h).
//
// Launchers that stay connected (machines.h) let new machines in later, by the same words: the answer is then the epoch
// that has taken the new one in. A launcher that waits where one was lost is told by them where the job runs:
//
//   new machine -> member     lockstep 2 LEAST:MOST stays LENGTH JOB MEMBER      member -> new machine   epoch NUMBER-OF-JOB EPOCH
//   member -> waiting one     running ADDRESS PORT lockstep 2 …                                          refused
#pragma once

#include <string>

#include "lockstep/base/sockets/endpoint.h"
#include "lockstep/deadline.h"
#include "lockstep/launch/roster.h"

namespace lockstep {

struct NodeMeeting {
  Endpoint place;   // where they meet
  std::string job;  // --rdzv-id: launchers with another one are refused
  int least = 1;    // machines
  int most = 1;
  int ranks = 1;                   // on this machine
  milliseconds timeout{600'000};   // until `least` machines have come
  milliseconds last_call{30'000};  // for more than `least`
  bool stays = false;              // the launchers stay connected; all must want it, or none
};

// Blocks until every machine has its place (place_of() of epoch.h). Throws RendezvousError: too few machines at the
// deadline, another job at the endpoint, no address of any machine, another secret here than there; EnvironmentError: a
// secret that is none; UsageError: a job whose name does not fit into a line.
Roster meet_nodes(const NodeMeeting& meeting);

}  // namespace lockstep
