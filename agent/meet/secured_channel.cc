// SPDX-License-Identifier: Apache-2.0
#include "agent/meet/secured_channel.h"

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <string_view>

#include "agent/meet/tls_channel.h"
#include "lockstep/base/sockets/poll.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr std::string_view kAsksForSecret = "munge?\n";  // TLS begins with 0x16
constexpr std::size_t kLongestCredential = 4096;

// Gives credentials to who asks for one, and is a TlsChannel to everybody else.
class OfferingChannel final : public TlsChannel {
 public:
  OfferingChannel(UniqueFd fd, const SecretPtr& secret)
      : TlsChannel(std::move(fd), secret->find().value(), Role::kServer), offered_(secret) {}

  std::optional<std::size_t> read(std::span<char> room) override {
    if (!offered_) return TlsChannel::read(room);
    char first = 0;
    const ssize_t bytes = asked_.empty() ? ::recv(fd(), &first, 1, MSG_PEEK) : 0;
    if (bytes < 0) return errno == EAGAIN || errno == EINTR ? std::optional<std::size_t>(0) : std::nullopt;
    if (asked_.empty() && bytes == 1 && first != kAsksForSecret.front()) {
      offered_.reset();
      return TlsChannel::read(room);
    }
    return hear();
  }

 private:
  // Returns nothing once all is said. Reads the whole question: closing a socket with unread bytes takes the answer back.
  std::optional<std::size_t> hear() {
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
  std::string answer;
  std::array<char, 512> room{};
  while (answer.size() < kLongestCredential && wait_for(POLLIN, fd.get(), deadline)) {
    const ssize_t bytes = ::recv(fd.get(), room.data(), room.size(), 0);
    if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (bytes <= 0) return bytes == 0 && answer.starts_with("MUNGE:") ? std::optional(answer) : std::nullopt;
    answer.append(room.data(), static_cast<std::size_t>(bytes));
  }
  return std::nullopt;
}

}  // namespace

std::unique_ptr<Channel> serve_channel(UniqueFd fd, const SecretPtr& secret) {
  if (secret->is_off()) return std::make_unique<Channel>(std::move(fd));
  if (secret->comes_by_munge()) return std::make_unique<OfferingChannel>(std::move(fd), secret);
  const auto key = secret->find();
  return key ? std::make_unique<TlsChannel>(std::move(fd), *key, TlsChannel::Role::kServer) : nullptr;
}

std::function<std::unique_ptr<Channel>(UniqueFd)> admit_by(SecretPtr secret) {
  return [secret = std::move(secret)](UniqueFd fd) -> std::unique_ptr<Channel> {
    try {
      return serve_channel(std::move(fd), secret);
    } catch (const Error&) {
      return nullptr;
    }
  };
}

std::optional<SecuredConnection> connect_securely(const AddressList& addresses, const JobSecret& secret,
                                                  const Deadline& deadline) {
  auto answered = connect_to(addresses, deadline);
  if (!answered) return std::nullopt;
  if (secret.is_off()) return SecuredConnection{std::make_unique<Channel>(std::move(answered->fd)), answered->address};
  auto key = secret.find();
  if (secret.comes_by_munge()) {
    if (const auto credential = ask_for_credential(answered->fd, deadline)) key = secret_in(*credential);
    answered = connect_to(addresses, deadline);
  }
  if (!answered || !key) return SecuredConnection{nullptr, ""};
  return SecuredConnection{std::make_unique<TlsChannel>(std::move(answered->fd), *key, TlsChannel::Role::kClient),
                           answered->address, key};
}

}  // namespace lockstep
