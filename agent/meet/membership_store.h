// SPDX-License-Identifier: Apache-2.0
// agent/meet/membership_store.h: where the launchers of a job keep what they agree on: at the first machine, which has to live, or in
// etcd, where any machine may die.
//
// Flow:    machines.cc, in a process of its own -> here -> first_machine_store.cc, etcd_store.cc
// Owns:    the connection
// Threads: one
// Ranks:   one per launcher
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/base/sockets/endpoint.h"
#include "lockstep/deadline.h"

namespace lockstep {

class MembershipStore {
 public:
  struct Entry {
    std::string value;
    int64_t created = 0;  // grows from key to key
  };
  using Entries = std::map<std::string, Entry>;  // by key

  virtual ~MembershipStore() = default;

  // Each blocks for some seconds at most. Nothing, false: no answer.
  virtual std::optional<Entries> read() = 0;  // all keys of the job, as they are at one moment
  // Writes a key that goes when this process has ended, or was silent for as long as `silence` of what opened the store.
  // Called again and again, also with the same value, it says that this process lives.
  virtual bool write_own(const std::string& key, const std::string& value) = 0;
  // Writes a key if it has the value `expected`; "": if it is not there. False also if it has another one.
  virtual bool replace(const std::string& key, const std::string& expected, const std::string& value) = 0;

  const std::string& own_address() const { return own_address_; }  // of this machine, as a number, towards the others
  virtual bool is_lost() const { return false; }                   // it will never answer again
  virtual bool serves() const { return false; }                    // the others read it from this process
  virtual std::string name() const = 0;                            // "the first machine, n1:29400", for messages

 protected:
  explicit MembershipStore(std::string own_address) : own_address_(std::move(own_address)) {}

  std::string own_address_;
};

struct Meeting {
  std::vector<Endpoint> places;  // where the machines meet; of etcd each of its members
  std::string job;               // --rdzv-id: launchers with another one are refused
  int least = 1;                 // machines
  int most = 1;
  int ranks = 1;                   // on this machine
  bool replaces = false;           // the job goes on after a loss, and takes new machines in; all must want it, or none
  milliseconds timeout{600'000};   // until `least` machines have come
  milliseconds last_call{30'000};  // for more than `least`
  milliseconds silence{3000};      // of a machine, until it is lost

  // Files for TLS with etcd. "": not that one.
  std::string certificates{};  // of those who may have signed etcd's certificate. "": no TLS
  std::string certificate{};   // this user's
  std::string key{};
  std::string prefix = "/lockstep/";  // of all keys
};

// The launcher that can listen at the place serves the store, and is the first machine; the others connect. Blocks until one answers.
// Throws RendezvousError: nobody does before the deadline, or not a launcher of this job; EnvironmentError: a secret that is none.
std::unique_ptr<MembershipStore> open_first_machine_store(const Meeting& meeting, const Deadline& deadline);

// Blocks until one of etcd's members answers. Throws RendezvousError: none does before the deadline; EnvironmentError: this machine
// has no libcurl.
std::unique_ptr<MembershipStore> open_etcd_store(const Meeting& meeting, const Deadline& deadline);

}  // namespace lockstep
