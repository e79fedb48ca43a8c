// SPDX-License-Identifier: Apache-2.0
#include "agent/meet/secured_meeting.h"

#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <string_view>

#include "agent/meet/tls_channel.h"
#include "lockstep/base/pipe.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

constexpr std::string_view kAsksForSecret = "munge?\n";  // TLS begins with 0x16
constexpr size_t kLongestCredential = 4096;
constexpr std::chrono::minutes kSecretIsSeenWithin{1};  // a file in a home on NFS may be seen late

// Gives credentials to who asks for one, and is a TlsChannel to everybody else.
class OfferingChannel final : public TlsChannel {
 public:
  OfferingChannel(UniqueFd fd, const SecretPtr& secret)
      : TlsChannel(std::move(fd), secret->find().value(), Role::kServer), offered_(secret) {}

  std::optional<size_t> read(std::span<char> room) override {
    if (!offered_) return TlsChannel::read(room);
    char first = 0;
    const ssize_t bytes = asked_.empty() ? ::recv(fd(), &first, 1, MSG_PEEK) : 0;
    if (bytes < 0) return errno == EAGAIN || errno == EINTR ? std::optional<size_t>(0) : std::nullopt;
    if (asked_.empty() && bytes == 1 && first != kAsksForSecret.front()) {
      offered_.reset();
      return TlsChannel::read(room);
    }
    return hear();
  }

 private:
  // Returns nothing once all is said. Reads the whole question: closing a socket with unread bytes takes the answer back.
  std::optional<size_t> hear() {
    std::array<char, kAsksForSecret.size()> room{};
    const auto count = Channel::read(std::span(room).first(kAsksForSecret.size() - asked_.size()));
    if (!count) return std::nullopt;
    asked_.append(room.data(), *count);
    if (!kAsksForSecret.starts_with(asked_)) return std::nullopt;
    if (asked_.size() < kAsksForSecret.size()) return 0;
    if (const auto credential = offered_->credential()) (void)Channel::write(*credential);
    return std::nullopt;
  }

  SecretPtr offered_;  // none: it is TLS
  std::string asked_;
};

// Returns nothing if the other end has closed it without a word, or says nothing.
std::optional<std::string> ask_for_credential(const UniqueFd& fd, const Deadline& deadline) {
  if (::send(fd.get(), kAsksForSecret.data(), kAsksForSecret.size(), MSG_NOSIGNAL) != std::ssize(kAsksForSecret))
    return std::nullopt;
  auto [answer, has_ended] = read_to_end_of(fd.get(), deadline, kLongestCredential);
  return has_ended && answer.starts_with("MUNGE:") ? std::optional(std::move(answer)) : std::nullopt;
}

// Null: it has no secret yet, or the secret can't be had.
std::unique_ptr<Channel> admit(UniqueFd fd, const SecretPtr& secret) try {
  if (secret->is_off()) return std::make_unique<Channel>(std::move(fd));
  if (secret->comes_by_munge()) return std::make_unique<OfferingChannel>(std::move(fd), secret);
  const auto key = secret->find();
  return key ? std::make_unique<TlsChannel>(std::move(fd), *key, TlsChannel::Role::kServer) : nullptr;
} catch (const Error&) {
  return nullptr;
}

}  // namespace

MeetingClientPtr serve_secured(UniqueFd listener, SecretPtr secret) {
  const std::string address = endpoint_of(listener.get()).host;
  const auto admit_holders = [secret = std::move(secret)](UniqueFd fd) { return admit(std::move(fd), secret); };
  return MeetingClient::serve(std::move(listener), admit_holders, address);
}

// A connection does not prove that the other end has the same secret: the first read or write shows it.
std::unique_ptr<Channel> SecuredJoin::connect(const AddressList& addresses, const Deadline& deadline) {
  auto answered = connect_to(addresses, deadline);
  if (!answered) return nullptr;
  if (!secret_by_) secret_by_ = Deadline::after(kSecretIsSeenWithin);
  if (secret_->is_off()) return std::make_unique<Channel>(std::move(answered->fd));
  auto key = secret_->find();
  if (secret_->comes_by_munge()) {
    if (const auto credential = ask_for_credential(answered->fd, deadline)) key = secret_in(*credential);
    answered = connect_to(addresses, deadline);
  }
  if (!answered || !key) return nullptr;
  return std::make_unique<TlsChannel>(std::move(answered->fd), *key, TlsChannel::Role::kClient);
}

MeetingClientPtr SecuredJoin::try_at(const AddressList& addresses, const Deadline& deadline) {
  auto channel = connect(addresses, deadline);
  if (!channel) return nullptr;
  const std::string address = endpoint_of(channel->fd()).host;
  return MeetingClient::join(std::move(channel), deadline, address);
}

RendezvousError SecuredJoin::error(const std::string& who, const std::string& place) const {
  if (!secret_by_)
    return RendezvousError(
        {.what = concat(who, " got no answer at ", place),
         .likely = "the first process of the job did not start, died early or has another address or port; a name that "
                   "does not resolve; or a firewall",
         .next = "look at its output; give all machines the address and port of the first one"});
  if (lacks_secret())
    return RendezvousError({.what = concat(who, " has no secret for the job at ", place),
                            .likely =
                                "the first machine's home is not this one's; or this machine has no munged, and the "
                                "first one has",
                            .next = ways_to_a_secret()});
  return RendezvousError(
      {.what = concat(who, " was refused at ", place, ": what listens there is not this job's store"),
       .likely = "another secret than on the first machine, --insecure-network on one of them only, or another program",
       .next = ways_to_a_secret()});
}

}  // namespace lockstep
