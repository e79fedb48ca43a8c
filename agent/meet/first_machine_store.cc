// SPDX-License-Identifier: Apache-2.0
// agent/meet/first_machine_store.cc: the launcher that can listen at the place where all meet serves the store to the others, through
// channels that ask for the job's secret.
//
// Flow:    membership_store.h -> here -> meeting_client.h, store_server.h
// Owns:    the connection; at the first machine also the server
// Threads: one, and at the first machine the server's
#include <algorithm>
#include <thread>
#include <utility>

#include "agent/meet/interfaces.h"
#include "agent/meet/meeting_client.h"
#include "agent/meet/membership_store.h"
#include "agent/meet/secured_channel.h"
#include "agent/meet/store_server.h"
#include "lockstep/base/sockets/port.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

using Kind = Packet::Kind;

constexpr milliseconds kTryEvery{100};
constexpr milliseconds kConnectsWithin{5000};
constexpr milliseconds kSecretIsSeenWithin{60'000};  // a file in a home on NFS may be seen late
constexpr const char* kPrefix = "job/";
constexpr const char* kTerms = "terms";  // what all launchers of a job have alike

std::string terms_of(const Meeting& meeting) {
  return concat(meeting.least, ":", meeting.most, meeting.replaces ? " replaces " : " ", meeting.job);
}

class FirstMachineStore final : public MembershipStore {
 public:
  FirstMachineStore(std::unique_ptr<Channel> channel, std::string place, std::string own_address, milliseconds silence)
      : client_(std::move(channel)),
        place_(std::move(place)),
        own_address_(std::move(own_address)),
        silence_(silence) {}

  void serve_with(std::unique_ptr<MeetingServer> server) { server_ = std::move(server); }
  bool hello(const Deadline& deadline) { return client_.hello(deadline); }

  // Nothing: no answer.
  std::optional<bool> has_terms(const std::string& mine) {
    const auto answer = ask({.kind = Kind::kCompareSet, .texts = {kTerms, "", mine}});
    if (!answer) return std::nullopt;
    return answer->texts.size() == 1 && answer->texts.front() == mine;
  }

  std::optional<Entries> read() override {
    const auto answer = ask({.kind = Kind::kList, .texts = {kPrefix}});
    if (!answer) return std::nullopt;
    Entries entries;
    for (std::size_t i = 0; i + 2 < answer->texts.size(); i += 3) {
      Entry entry{answer->texts[i + 1]};
      if (parse_int(answer->texts[i + 2], entry.created))
        entries.emplace(answer->texts[i].substr(std::string_view(kPrefix).size()), std::move(entry));
    }
    return entries;
  }
  bool write_own(const std::string& key, const std::string& value) override {
    return ask({.kind = Kind::kSetOwn, .number = silence_.count(), .texts = {kPrefix + key, value}}).has_value();
  }
  bool replace(const std::string& key, const std::string& expected, const std::string& value) override {
    const auto answer = ask({.kind = Kind::kCompareSet, .texts = {kPrefix + key, expected, value}});
    return answer && answer->texts.size() == 1 && answer->texts.front() == value;
  }

  const std::string& own_address() const override { return own_address_; }
  bool is_lost() const override { return lost_; }
  bool serves() const override { return server_ != nullptr; }
  std::string name() const override { return concat("the first machine, ", place_); }

 private:
  std::optional<Packet> ask(const Packet& request) {
    auto answer = client_.ask(request, Deadline::after(silence_));
    lost_ = !answer;
    if (answer && answer->kind == Kind::kRefused) answer.reset();
    return answer;
  }

  std::unique_ptr<MeetingServer> server_{};
  MeetingClient client_;
  std::string place_;
  std::string own_address_;
  milliseconds silence_;
  bool lost_ = false;
};

// Returns none while the name is unknown: if machines start with the job, DNS learns it a little later. Debian gives a
// machine's own name the address 127.0.1.1, at which the others can't reach it.
AddressList find_addresses(const Endpoint& place, const Deadline& deadline) {
  AddressList found = look_up(place, deadline).addresses;
  if (!found || is_loopback(place.host) || !is_loopback(numeric(found->ai_addr, found->ai_addrlen))) return found;
  const std::string mine = address_for_others();
  return mine.empty() ? std::move(found) : look_up({mine, place.port}, deadline).addresses;
}

SecretPtr secret_of(const Meeting& meeting, bool is_first) {
  return std::make_shared<const JobSecret>(concat("machines ", meeting.places.front().text(), " ", meeting.job),
                                           is_first);
}

RendezvousError nobody(const Meeting& meeting, bool was_answered) {
  const std::string place = meeting.places.front().text();
  if (was_answered)
    return RendezvousError({.what = concat("this machine was refused at ", place),
                            .here = concat("--rdzv-id '", meeting.job, "'"),
                            .likely = "another or no secret on one side, or another program answers",
                            .next = ways_to_a_secret()});
  return RendezvousError(
      {.what = concat("no launcher of this job at ", place),
       .likely = "a name that does not resolve, a firewall, or a job that began without this machine",
       .next = "give every machine the same --rdzv-endpoint, the address of one of them"});
}

RendezvousError wrong_job(const Meeting& meeting) {
  return RendezvousError(
      {.what = concat("the launcher at ", meeting.places.front().text(), " is not one of this job"),
       .here = concat("--rdzv-id '", meeting.job, "', --nnodes ", meeting.least, ":", meeting.most),
       .likely = "two jobs with one --rdzv-endpoint, or machines with different --nnodes or --max-restarts",
       .next = "give every machine the same --nnodes, --rdzv-id, --rdzv-endpoint and --max-restarts"});
}

using StorePointer = std::unique_ptr<FirstMachineStore>;

StorePointer serve_at(UniqueFd listener, const Meeting& meeting) {
  const std::string address = endpoint_of(listener.get()).host;
  auto server = std::make_unique<MeetingServer>(std::move(listener), admit_by(secret_of(meeting, /*is_first=*/true)));
  auto store = std::make_unique<FirstMachineStore>(std::make_unique<Channel>(server->own_connection()),
                                                   meeting.places.front().text(), address, meeting.silence);
  store->serve_with(std::move(server));
  return store;
}

// None: what answered has not let this machine in.
StorePointer join_by(std::unique_ptr<Channel> channel, const Meeting& meeting, const Deadline& deadline) {
  if (!channel) return {};
  const std::string address = endpoint_of(channel->fd()).host;
  auto store =
      std::make_unique<FirstMachineStore>(std::move(channel), meeting.places.front().text(), address, meeting.silence);
  return store->hello(deadline) ? std::move(store) : nullptr;
}

}  // namespace

std::unique_ptr<MembershipStore> open_first_machine_store(const Meeting& meeting, const Deadline& deadline) {
  SecretPtr secret;
  std::optional<Deadline> secret_by;  // since somebody answers
  do {
    const AddressList addresses = find_addresses(meeting.places.front(), deadline);
    StorePointer store;
    if (UniqueFd listener = listen_at(addresses)) {
      store = serve_at(std::move(listener), meeting);
    } else {
      if (!secret) secret = secret_of(meeting, /*is_first=*/false);
      const Deadline soon = Deadline::after(std::min(kConnectsWithin, deadline.left()));
      if (auto answered = connect_securely(addresses, *secret, soon)) {
        if (!secret_by) secret_by = Deadline::after(kSecretIsSeenWithin);
        store = join_by(std::move(answered->channel), meeting, soon);
      }
    }
    const auto agreed = store ? store->has_terms(terms_of(meeting)) : std::nullopt;
    if (agreed && !*agreed) throw wrong_job(meeting);
    if (agreed) return store;
    if (secret_by && secret_by->passed() && !secret->is_off() && !secret->find()) break;
    std::this_thread::sleep_for(std::min(kTryEvery, deadline.left()));
  } while (!deadline.passed());
  throw nobody(meeting, secret_by.has_value());
}

}  // namespace lockstep
