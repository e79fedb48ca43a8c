// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/machines/tunnel.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <signal.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <list>
#include <mutex>
#include <shared_mutex>
#include <thread>

#include "lockstep/base/process/short_slices.h"
#include "lockstep/base/sockets/poll.h"
#include "lockstep/base/sockets/port.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr size_t kRoom = size_t{64} << 10;            // of a connection, in each direction
constexpr uint64_t kBytesPerKey = uint64_t{1} << 36;  // 2^22 records: AES-GCM's limit is 2^24.5
constexpr std::chrono::seconds kHandshakeWithin{20};
constexpr std::chrono::seconds kGoodbyeWithin{5};
constexpr ptrdiff_t kMostStrangers = 64;  // connections whose handshake is under way
constexpr milliseconds kTick{500};
constexpr int kMostRounds = 16;  // of one connection before the others have their turn

sockaddr_in loopback(const Endpoint& endpoint) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(endpoint.port));
  ::inet_pton(AF_INET, endpoint.host.c_str(), &address.sin_addr);
  return address;
}

const sockaddr* raw(const sockaddr_in& address) { return reinterpret_cast<const sockaddr*>(&address); }

bool switch_on(const UniqueFd& fd, int level, int option) {
  const int yes = 1;
  return ::setsockopt(fd.get(), level, option, &yes, sizeof yes) == 0;
}

UniqueFd new_socket(int family) {
  UniqueFd fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd || !switch_on(fd, IPPROTO_TCP, TCP_NODELAY)) throw system_error("make", "a socket");
  return fd;
}

// Several sockets of this user can have the port, and nobody else's.
UniqueFd bound_socket(const Endpoint& own) {
  const sockaddr_in address = loopback(own);
  UniqueFd fd = new_socket(AF_INET);
  if (!switch_on(fd, SOL_SOCKET, SO_REUSEPORT) || ::bind(fd.get(), raw(address), sizeof address) != 0)
    throw system_error("bind", concat("a port of ", own.host));
  return fd;
}

// Begins; whoever sends finds out whether it has become one. None: it could not begin.
UniqueFd begin_to_connect(UniqueFd fd, const sockaddr* there, socklen_t length) {
  return ::connect(fd.get(), there, length) == 0 || errno == EINPROGRESS ? std::move(fd) : UniqueFd();
}

UniqueFd connection_to(const Endpoint& there) {
  const AddressList address = address_of_number(there);
  if (!address) return {};
  return begin_to_connect(new_socket(address->ai_family), address->ai_addr, address->ai_addrlen);
}

// None: errno says why.
UniqueFd listener_at(const Endpoint& own) {
  UniqueFd fd = listen_at(address_of_number(own));
  return fd && ::fcntl(fd.get(), F_SETFL, O_NONBLOCK) == 0 ? std::move(fd) : UniqueFd();
}

UniqueFd accepted_from(int listener) {
  UniqueFd fd(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (fd) switch_on(fd, IPPROTO_TCP, TCP_NODELAY);
  if (!fd && errno != EAGAIN && errno != ECONNABORTED) std::this_thread::sleep_for(milliseconds(10));  // no descriptors
  return fd;
}

// ---- One connection of Gloo

class Buffer {
 public:
  bool empty() const { return begin_ == end_; }
  std::span<char> room() { return empty() ? begin_ = end_ = 0, std::span(bytes_) : std::span<char>(); }
  void fill(size_t count) { end_ = count; }
  std::span<const char> filled() const { return std::span(bytes_).subspan(begin_, end_ - begin_); }
  void take(size_t count) { begin_ += count; }

 private:
  std::vector<char> bytes_ = std::vector<char>(kRoom);
  size_t begin_ = 0, end_ = 0;
};

// The first bytes on a TLS connection: where Gloo listens.
struct Destination {
  uint32_t address = 0;  // both in network order
  uint32_t port = 0;     // 0: nowhere; who connects only wants to know whether that works
};

class Carried {
 public:
  // Gloo has connected here, for another machine, to which `remote` goes.
  Carried(const TlsIdentity& identity, UniqueFd gloo, UniqueFd remote, const Destination& destination)
      : gloo_(std::move(gloo)),
        remote_(std::move(remote)),
        ssl_(identity.end_of(remote_.get(), true)),
        connects_(true) {
    const auto room = out_.room();
    std::memcpy(room.data(), &destination, sizeof destination);
    out_.fill(sizeof destination);
    wants_to_write_ = true;  // as soon as it is connected
  }

  // Another tunnel has connected.
  Carried(const TlsIdentity& identity, UniqueFd remote)
      : remote_(std::move(remote)), ssl_(identity.end_of(remote_.get(), false)) {}

  ~Carried() {
    close(gloo_);
    close(remote_);
  }
  Carried& operator=(Carried&&) = delete;

  bool is_stranger() const { return !is_known_ && !connects_; }
  bool has_deadline() const { return !is_known_ || leaving_; }
  bool is_late() const { return has_deadline() && until_.passed(); }
  bool has_more() const { return has_more_; }

  void add_to(std::vector<pollfd>& polls) {
    const bool open = is_known_ && !leaving_;
    const bool renews_key = is_known_ && ::SSL_is_init_finished(ssl_.get()) == 0;  // and reads nothing meanwhile
    polls.push_back(waiting_for(gloo_, open && out_.empty(), open && !in_.empty()));
    polls.push_back(waiting_for(remote_, !renews_key && (in_.empty() || !open), wants_to_write_));
  }

  // Moves what there is to move. False: it is over. `reach_gloo`: a connection to that place, or none.
  template <class Reach>
  bool go_on(const Reach& reach_gloo) {
    wants_to_write_ = has_more_ = false;
    if (::SSL_is_init_finished(ssl_.get()) == 0 && !goes_on(ask(::SSL_do_handshake))) return false;
    if (::SSL_is_init_finished(ssl_.get()) == 0) return true;
    if (!gloo_ && !leaving_) return find_gloo(reach_gloo);
    is_known_ = true;
    for (int round = 0; round < kMostRounds; ++round) {
      bool moved = false;
      if (!send(moved) || !receive(moved)) return false;
      if (!moved) return true;
    }
    has_more_ = true;  // in turn with the other connections
    return true;
  }

 private:
  // So that it ends also where a forked child has a copy of the descriptor.
  static void close(UniqueFd& fd) {
    if (fd) ::shutdown(fd.get(), SHUT_RDWR);
    fd.reset();
  }

  // One that is waited for neither way is left out: poll() would always say that it is gone.
  static pollfd waiting_for(const UniqueFd& fd, bool in, bool out) {
    return to_poll(in || out ? fd.get() : -1, static_cast<short>((in ? POLLIN : 0) | (out ? POLLOUT : 0)));
  }

  template <class Call, class... Arguments>
  int ask(const Call& call, Arguments... arguments) {
    ::ERR_clear_error();  // SSL_get_error() looks at errors of calls before, too
    return call(ssl_.get(), arguments...);
  }

  // Notes for which readiness of the socket OpenSSL waits. False: it failed for good.
  bool goes_on(int result) {
    if (result > 0) return true;
    const int error = ::SSL_get_error(ssl_.get(), result);
    if (error == SSL_ERROR_WANT_WRITE) wants_to_write_ = true;
    return error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE;
  }

  template <class Reach>
  bool find_gloo(const Reach& reach_gloo) {
    Destination destination;
    size_t count = 0;
    const int result = ask(::SSL_read_ex, static_cast<void*>(&destination), sizeof destination, &count);
    if (result <= 0) return goes_on(result);
    if (count == sizeof destination) gloo_ = reach_gloo(destination);
    if (destination.port == 0) ask(::SSL_shutdown);  // an answer
    return gloo_ && go_on(reach_gloo);
  }

  // From Gloo to the other machine.
  bool send(bool& moved) {
    if (const auto room = leaving_ ? std::span<char>() : out_.room(); !room.empty()) {
      const ssize_t count = ::recv(gloo_.get(), room.data(), room.size(), 0);
      if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) leave();
      if (count > 0) out_.fill(static_cast<size_t>(count));
    }
    if (leaving_ || out_.empty()) return true;
    size_t count = 0;
    const auto bytes = out_.filled();
    if (!remote_is_gone_) {
      const int result = ask(::SSL_write_ex, static_cast<const void*>(bytes.data()), bytes.size(), &count);
      if (result <= 0 && goes_on(result)) return true;
      remote_is_gone_ = result <= 0;  // what it has sent before is still read
    }
    moved = true;
    out_.take(remote_is_gone_ ? bytes.size() : count);
    renew_key(count);
    return true;
  }

  // One end does, and asks the other to: two that wait for room to say so would wait for each other.
  void renew_key(size_t bytes) {
    if ((with_this_key_ += bytes) < kBytesPerKey || !connects_ || remote_is_gone_) return;
    with_this_key_ = 0;
    ask(::SSL_key_update, SSL_KEY_UPDATE_REQUESTED);
  }

  // Gloo has closed its end. What it sent before must arrive, so this end is closed only when the other one is.
  void leave() {
    leaving_ = true;
    close(gloo_);
    until_ = Deadline::after(kGoodbyeWithin);
    if (!remote_is_gone_) ask(::SSL_shutdown);
    ::shutdown(remote_.get(), SHUT_WR);
  }

  // From the other machine to Gloo.
  bool receive(bool& moved) {
    if (leaving_ || gloo_is_gone_) in_.take(in_.filled().size());  // nobody wants it any more
    if (const auto room = in_.room(); !room.empty()) {
      int result = 1;
      size_t filled = 0;
      while (result > 0 && filled < room.size()) {  // a record at a time
        size_t count = 0;
        result = ask(::SSL_read_ex, static_cast<void*>(room.data() + filled), room.size() - filled, &count);
        if (result > 0) filled += count;
      }
      if (filled == 0) return goes_on(result);
      in_.fill(filled);
      renew_key(filled);
    }
    if (!leaving_ && !gloo_is_gone_) {
      const auto bytes = in_.filled();
      const ssize_t count = ::send(gloo_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (count < 0 && (errno == EAGAIN || errno == EINTR)) return true;
      gloo_is_gone_ = count < 0;  // what it has sent before is still read
      if (count > 0) in_.take(static_cast<size_t>(count));
    }
    moved = true;  // OpenSSL may have more, of which poll() knows nothing
    return true;
  }

  UniqueFd gloo_;
  UniqueFd remote_;
  SslPtr ssl_;
  Buffer out_, in_;
  uint64_t with_this_key_ = 0;   // bytes, both ways
  const bool connects_ = false;  // the other end was called from here
  bool is_known_ = false;        // and has shown that it belongs to the job
  bool wants_to_write_ = false;
  bool has_more_ = false;
  bool gloo_is_gone_ = false, remote_is_gone_ = false;  // it takes nothing more
  bool leaving_ = false;
  Deadline until_ = Deadline::after(kHandshakeWithin);
};

// ---- Threads that still carry something

class Alive {
 public:
  // One of them, until what is returned is gone.
  static std::shared_ptr<void> begin() {
    static auto& alive = *new Alive;  // lives as long as the threads
    const std::lock_guard lock(alive.mutex_);
    if (std::exchange(alive.process_, ::getpid()) != ::getpid()) alive.threads_ = 0;  // a fork has none
    ++alive.threads_;
    return {&alive, [](Alive* one) { one->end(); }};
  }

  // While a thread uses OpenSSL, which a process that exits takes away.
  static std::shared_mutex& working() {
    static auto& working = *new std::shared_mutex;
    return working;
  }

 private:
  Alive() {
    static Alive* const alive = this;
    std::atexit([] {
      std::unique_lock lock(alive->mutex_);
      if (alive->process_ != ::getpid()) return;
      alive->ended_.wait_for(lock, kLastConnectionsWithin, [] { return alive->threads_ == 0; });
      working().lock();  // for ever
    });
  }

  void end() {
    const std::lock_guard lock(mutex_);
    --threads_;
    ended_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable ended_;
  int threads_ = 0;
  pid_t process_ = ::getpid();  // that has them
};

}  // namespace

// ---- The thread

struct Tunnel::State {
  std::shared_ptr<const TlsIdentity> identity;
  Endpoint own;   // its host: this machine's loopback address
  UniqueFd door;  // of the other tunnels
  UniqueFd wake{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::vector<UniqueFd> sources;
  std::vector<int> source_ports;
  std::vector<std::pair<UniqueFd, Endpoint>> places;  // of Gloo on other machines, at which this listens
  std::set<int> gloo_here;                            // its ports
  std::map<int, size_t> connected;                    // so often to each of them
  std::map<std::string, Endpoint> tunnels;
  std::list<Carried> carried;
  bool started = false;

  void serve() {
    bool is_open = true;
    while (is_open || !carried.empty()) {
      const auto strangers = std::ranges::count_if(carried, [](const Carried& one) { return one.is_stranger(); });
      std::vector<pollfd> polls{to_poll(is_open ? wake.get() : -1),
                                to_poll(is_open && strangers < kMostStrangers ? door.get() : -1)};
      for (const auto& [listener, place] : places) polls.push_back(to_poll(listener.get()));
      const size_t first = polls.size();
      milliseconds longest(-1);
      for (Carried& one : carried) {
        one.add_to(polls);
        if (one.has_deadline() && longest < milliseconds(0)) longest = kTick;
        if (one.has_more()) longest = milliseconds(0);
      }
      if (poll_for(polls, longest) < 0) continue;
      const std::shared_lock working(Alive::working());
      size_t at = first;
      std::erase_if(carried, [&](Carried& one) {
        const bool is_ready = one.has_more() || polls[at].revents != 0 || polls[at + 1].revents != 0;
        at += 2;
        return (is_ready && !goes_on(one)) || one.is_late();
      });
      if (is_open && !(is_open = take_in(std::span(polls).first(first)))) {
        door.reset();
        places.clear();
        sources.clear();
      }
    }
  }

  // A connection for which there is no socket or memory is lost, and those at its ends find that out.
  bool goes_on(Carried& one) try {
    return one.go_on([&](const Destination& place) { return reach_gloo(place); });
  } catch (const std::exception&) {
    return false;
  }

  // False: nobody else is to be let in.
  bool take_in(std::span<const pollfd> doors) try {
    if (doors[1].revents != 0)
      if (UniqueFd fd = accepted_from(door.get())) carried.emplace_back(*identity, std::move(fd));
    for (size_t i = 0; i < places.size(); ++i)
      if (doors[2 + i].revents != 0)
        if (UniqueFd fd = accepted_from(places[i].first.get()); fd && user_of_other_end(fd.get()) == ::geteuid())
          connect_for(std::move(fd), places[i].second);
    return doors[0].revents == 0;
  } catch (const std::exception&) {  // as above
    return doors[0].revents == 0;
  }

  void connect_for(UniqueFd gloo, const Endpoint& place) {
    const sockaddr_in address = loopback(place);
    if (UniqueFd remote = connection_to(tunnels.at(place.host)))
      carried.emplace_back(*identity, std::move(gloo), std::move(remote),
                           Destination{address.sin_addr.s_addr, address.sin_port});
  }

  UniqueFd reach_gloo(const Destination& destination) {
    sockaddr_in there = loopback(own);
    there.sin_port = static_cast<in_port_t>(destination.port);
    const int port = ntohs(there.sin_port);
    if (destination.address != there.sin_addr.s_addr || !gloo_here.contains(port) ||
        connected[port] >= source_ports.size())
      return {};
    return begin_to_connect(bound_socket({own.host, source_ports[connected[port]++]}), raw(there), sizeof there);
  }
};

// ---- Tunnel

Tunnel::Tunnel(std::shared_ptr<const TlsIdentity> identity, const std::string& address, const std::string& own,
               int others)
    : state_(std::make_shared<State>()) {
  state_->identity = std::move(identity);
  state_->own = {own, 0};
  state_->door = listener_at({address, 0});
  if (!state_->door) throw system_error("listen at", address);
  for (int i = 0; i < others; ++i) {
    state_->sources.push_back(bound_socket(state_->own));
    state_->source_ports.push_back(endpoint_of(state_->sources.back().get()).port);
  }
}

Tunnel::~Tunnel() {
  const uint64_t one = 1;
  if (state_->started) static_cast<void>(!::write(state_->wake.get(), &one, sizeof one));
}

Endpoint Tunnel::endpoint() const { return endpoint_of(state_->door.get()); }

std::vector<int> Tunnel::sources() const { return state_->source_ports; }

bool Tunnel::listen_for(const Endpoint& gloo) {
  UniqueFd fd = listener_at(gloo);
  if (!fd && errno == EADDRINUSE) return false;
  if (!fd) throw system_error("listen at", gloo.text());
  state_->places.emplace_back(std::move(fd), gloo);
  return true;
}

void Tunnel::start(std::vector<Endpoint> gloo_here, std::map<std::string, Endpoint> tunnels) {
  for (const Endpoint& gloo : gloo_here) state_->gloo_here.insert(gloo.port);
  state_->tunnels = std::move(tunnels);
  state_->started = true;
  std::thread([state = state_, alive = Alive::begin()] {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
    ask_for_short_slices();
    state->serve();
  }).detach();
}

std::string Tunnel::try_to_reach(const Endpoint& tunnel, const Deadline& deadline) const {
  const auto reached = connect_to(address_of_number(tunnel), deadline);
  if (!reached) return errno == ETIMEDOUT ? "it does not answer" : std::generic_category().message(errno);
  const int fd = reached->fd.get();
  const SslPtr ssl = state_->identity->end_of(fd, true);
  const Destination nowhere;
  char nothing = 0;
  // The other end says whether it trusts this one by how it ends: TLS 1.3 clients are done before that.
  const auto run = [&](auto&& call) {
    for (;;) {
      ::ERR_clear_error();
      const int result = call();
      if (result > 0) return SSL_ERROR_NONE;
      const int error = ::SSL_get_error(ssl.get(), result);
      if (error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE) return error;
      if (!wait_for(error == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT, fd, deadline)) return SSL_ERROR_WANT_ASYNC;
    }
  };
  int error = run([&] { return ::SSL_do_handshake(ssl.get()); });
  if (error == SSL_ERROR_NONE) error = run([&] { return ::SSL_write(ssl.get(), &nowhere, sizeof nowhere); });
  if (error == SSL_ERROR_NONE) error = run([&] { return ::SSL_read(ssl.get(), &nothing, 1); });
  if (error == SSL_ERROR_ZERO_RETURN) return "";
  if (error == SSL_ERROR_SSL) return "it has no key of this job, or does not trust this rank's";
  return error == SSL_ERROR_WANT_ASYNC ? "it does not answer" : "it closes the connection";
}

}  // namespace lockstep
