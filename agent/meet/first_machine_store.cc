// SPDX-License-Identifier: Apache-2.0
// agent/meet/first_machine_store.cc: the launcher that can listen at the place where all meet serves the store to the others, through
// channels that ask for the job's secret.
//
// Flow:    membership_store.h -> here -> secured_meeting.h
// Owns:    the connection; at the first machine also the server
// Threads: one, and at the first machine the server's
#include <algorithm>
#include <utility>

#include "agent/meet/interfaces.h"
#include "agent/meet/membership_store.h"
#include "agent/meet/secured_meeting.h"
#include "lockstep/base/retry.h"
#include "lockstep/base/sockets/port.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

using Kind = Packet::Kind;

constexpr milliseconds kTryEvery{100};
constexpr milliseconds kConnectsWithin{5000};
constexpr const char* kPrefix = "job/";
constexpr const char* kTerms = "terms";  // what all launchers of a job have alike

std::string terms_of(const Meeting& meeting) {
  return concat(meeting.least, ":", meeting.most, meeting.replaces ? " replaces " : " ", meeting.job);
}

class FirstMachineStore final : public MembershipStore {
 public:
  FirstMachineStore(MeetingClientPtr client, const Meeting& meeting)
      : MembershipStore(client->own_address()), client_(std::move(client)), meeting_(meeting) {}

  // Nothing: no answer.
  std::optional<bool> has_terms(const std::string& mine) const {
    const auto answer = ask({.kind = Kind::kCompareSet, .texts = {kTerms, "", mine}});
    return answer ? std::optional(answer->texts == std::vector{mine}) : std::nullopt;
  }

  std::optional<Entries> read() override {
    const auto answer = ask({.kind = Kind::kList, .texts = {kPrefix}});
    if (!answer) return std::nullopt;
    Entries entries;
    for (size_t i = 0; i + 2 < answer->texts.size(); i += 3) {
      Entry entry{answer->texts[i + 1]};
      if (parse_int(answer->texts[i + 2], entry.created))
        entries.emplace(answer->texts[i].substr(std::string_view(kPrefix).size()), std::move(entry));
    }
    return entries;
  }
  bool write_own(const std::string& key, const std::string& value) override {
    return ask({.kind = Kind::kSetOwn, .number = meeting_.silence.count(), .texts = {kPrefix + key, value}})
        .has_value();
  }
  bool replace(const std::string& key, const std::string& expected, const std::string& value) override {
    const auto answer = ask({.kind = Kind::kCompareSet, .texts = {kPrefix + key, expected, value}});
    return answer && answer->texts == std::vector{value};
  }

  bool is_lost() const override { return client_->is_lost(); }
  bool serves() const override { return client_->serves(); }
  std::string name() const override { return "the first machine, " + meeting_.places.front().text(); }

 private:
  std::optional<Packet> ask(const Packet& request) const {
    auto answer = client_->ask(request, Deadline::after(meeting_.silence));
    if (answer && answer->kind == Kind::kRefused) answer.reset();
    return answer;
  }

  MeetingClientPtr client_;
  Meeting meeting_;
};

// Returns none while the name is unknown: if machines start with the job, DNS learns it a little later. address_for_others()
// replaces the loopback address that a machine's own name may have.
AddressList find_addresses(const Endpoint& place, const Deadline& deadline) {
  AddressList found = look_up(place, deadline).addresses;
  if (!found || is_loopback(place.host) || !is_loopback(numeric(found->ai_addr, found->ai_addrlen))) return found;
  const std::string mine = address_for_others();
  return mine.empty() ? std::move(found) : look_up({mine, place.port}, deadline).addresses;
}

RendezvousError wrong_job(const Meeting& meeting) {
  return RendezvousError(
      {.what = concat("the launcher at ", meeting.places.front().text(), " is not one of this job"),
       .here = concat("--rdzv-id '", meeting.job, "', --nnodes ", meeting.least, ":", meeting.most),
       .likely = "two jobs with one --rdzv-endpoint, or machines with different --nnodes or --max-restarts",
       .next = "give every machine the same --nnodes, --rdzv-id, --rdzv-endpoint and --max-restarts"});
}

}  // namespace

std::unique_ptr<MembershipStore> open_first_machine_store(const Meeting& meeting, const Deadline& deadline) {
  const std::string place = meeting.places.front().text();
  const auto secret = [&](bool is_first) {
    return std::make_shared<const JobSecret>(concat("machines ", place, " ", meeting.job), is_first);
  };
  SecuredJoin join(secret(/*is_first=*/false));
  auto store = retry(deadline, kTryEvery, [&]() -> std::unique_ptr<FirstMachineStore> {
    const AddressList addresses = find_addresses(meeting.places.front(), deadline);
    MeetingClientPtr client;
    if (UniqueFd listener = listen_at(addresses)) {
      client = serve_secured(std::move(listener), secret(/*is_first=*/true));
    } else {
      client = join.try_at(addresses, Deadline::after(std::min(kConnectsWithin, deadline.left())));
      if (!client && join.is_hopeless()) throw join.error("this machine", place);
    }
    auto opened = client ? std::make_unique<FirstMachineStore>(std::move(client), meeting) : nullptr;
    const auto agreed = opened ? opened->has_terms(terms_of(meeting)) : std::nullopt;
    if (agreed && !*agreed) throw wrong_job(meeting);
    return agreed ? std::move(opened) : nullptr;
  });
  if (!store) throw join.error("this machine", place);
  return store;
}

}  // namespace lockstep
