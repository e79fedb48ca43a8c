// SPDX-License-Identifier: Apache-2.0
// The library that Gloo finds when it opens `libssl.so`: OpenSSL, with five of its functions changed. It is a module of its
// own, because a name that dlopen() is asked for matches the SONAME of a library that is loaded already. So no libssl-dev
// is needed, whose link of that name Gloo looks for. What is not defined here comes from libssl.so.3, which this links.
//
// Why they are changed. Gloo (as of libtorch 2.11, gloo/transport/tcp/tls/pair.cc)
//
//   writes a whole message in a loop while it holds the connection's lock, which reading needs: two machines that send to
//   each other at the same time would fill both sockets and wait for ever, spinning. Here a write never waits: what the
//   socket does not take at once is kept, encrypted, and a thread sends it. Gloo sends only what the peer has room for
//   (it has posted the receive), so no more than that is ever kept.
//
//   takes a connection that the peer has closed or reset for one with nothing to read, and asks again without end. Here
//   that is an error, which ends the waits for this peer.
//
//   reads from a connection that a failed write has closed. Here a write to a lost connection is dropped: the next read
//   finds the loss.
//
//   never renews keys, and AES-GCM's should not encrypt more than 2^24.5 records.
//
// Owns:    its thread, until the process ends
// Threads: any; each SSL has one user at a time
#include <dlfcn.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr std::uint64_t kRecordsPerKey = std::uint64_t{1} << 23;
constexpr int kBytesPerRecord = 16384;
constexpr int kLastBytesWithin = 1000;  // milliseconds without progress
constexpr std::chrono::seconds kAllLastBytesWithin{
    5};  // a connection is closed while others wait for the one who closes it
constexpr std::size_t kKeptRoom = std::size_t{1} << 20;  // of a connection that has sent all

// Holds what a socket has not taken yet.
class Outgoing {
 public:
  Outgoing(int fd, std::uint64_t id) : fd_(fd), id_(id) {}

  int fd() const { return fd_; }
  std::uint64_t id() const { return id_; }

  // False: lost. `all_sent`: nothing waits.
  bool add(const char* data, std::size_t bytes, bool* all_sent) {
    const std::lock_guard lock(mutex_);
    std::size_t taken = 0;
    if (waiting_.empty()) taken = give(data, bytes);
    waiting_.insert(waiting_.end(), data + taken, data + bytes);
    *all_sent = waiting_.empty() || lost_;
    return !lost_;
  }

  // True: nothing is left to send.
  bool send_waiting() {
    const std::lock_guard lock(mutex_);
    sent_ += give(waiting_.data() + sent_, waiting_.size() - sent_);
    if (lost_) sent_ = waiting_.size();
    if (sent_ < waiting_.size() && sent_ < waiting_.size() / 2) return false;
    waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(sent_));
    sent_ = 0;
    if (waiting_.empty() && waiting_.capacity() > kKeptRoom) waiting_ = {};
    return waiting_.empty();
  }

  // Blocks while the socket still takes something: what was written before a connection is closed must arrive.
  void finish() {
    pollfd writable{.fd = fd_, .events = POLLOUT, .revents = 0};
    const auto end = std::chrono::steady_clock::now() + kAllLastBytesWithin;
    while (!send_waiting() && std::chrono::steady_clock::now() < end) {
      const int ready = ::poll(&writable, 1, kLastBytesWithin);
      if (ready == 0 || (ready < 0 && errno != EINTR)) break;
    }
    const std::lock_guard lock(mutex_);
    lost_ = true;  // the descriptor is about to be closed
  }

 private:
  std::size_t give(const char* data, std::size_t bytes) {
    std::size_t given = 0;
    while (given < bytes && !lost_) {
      const ssize_t sent = ::send(fd_, data + given, bytes - given, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent >= 0)
        given += static_cast<std::size_t>(sent);
      else if (errno == EAGAIN || errno == EWOULDBLOCK)
        break;
      else if (errno != EINTR)
        lose();
    }
    return given;
  }

  void lose() {
    lost_ = true;
    ::shutdown(fd_, SHUT_RDWR);  // so that the next read, here and there, finds the loss
  }

  const int fd_;
  const std::uint64_t id_;
  std::mutex mutex_;  // guards the rest
  std::vector<char> waiting_;
  std::size_t sent_ = 0;  // of waiting_
  bool lost_ = false;
};

// Sends what waits as soon as sockets take it.
class Sender {
 public:
  static Sender& instance() {
    static auto* const sender = new Sender;  // its thread runs until the process has gone
    return *sender;
  }

  // Nothing: the process has no descriptor or memory left.
  std::shared_ptr<Outgoing> open(int fd) {
    const std::lock_guard lock(mutex_);
    auto outgoing = std::make_shared<Outgoing>(fd, ++opened_);
    if (!change(EPOLL_CTL_ADD, *outgoing, 0)) return nullptr;
    all_[opened_] = outgoing;
    return outgoing;
  }

  void send_later(const Outgoing& outgoing) { change(EPOLL_CTL_MOD, outgoing, EPOLLOUT); }

  void close(Outgoing& outgoing) {
    outgoing.finish();
    change(EPOLL_CTL_DEL, outgoing, 0);
    const std::lock_guard lock(mutex_);
    all_.erase(outgoing.id());
  }

 private:
  Sender() : epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
    if (epoll_ >= 0) std::thread([this] { run(); }).detach();
  }

  bool change(int operation, const Outgoing& outgoing, std::uint32_t events) const {
    epoll_event event{};
    event.events = events | EPOLLONESHOT;
    event.data.u64 = outgoing.id();
    return ::epoll_ctl(epoll_, operation, outgoing.fd(), &event) == 0;
  }

  std::shared_ptr<Outgoing> find(std::uint64_t id) {
    const std::lock_guard lock(mutex_);
    const auto found = all_.find(id);
    return found == all_.end() ? nullptr : found->second;
  }

  void run() {
    for (epoll_event event{};;) {
      if (::epoll_wait(epoll_, &event, 1, -1) != 1) continue;
      const auto outgoing = find(event.data.u64);
      if (outgoing && !outgoing->send_waiting()) send_later(*outgoing);
    }
  }

  const int epoll_;
  std::mutex mutex_;  // guards the rest
  std::uint64_t opened_ = 0;
  std::map<std::uint64_t, std::shared_ptr<Outgoing>> all_;
};

// ---- OpenSSL's way to a socket

struct Connection {
  std::shared_ptr<Outgoing> outgoing;
  std::uint64_t records = 0;  // since the last key
};

Connection* connection_of(BIO* bio) { return static_cast<Connection*>(::BIO_get_data(bio)); }

int write_to_socket(BIO* bio, const char* data, int bytes) {
  bool all_sent = true;
  Outgoing& outgoing = *connection_of(bio)->outgoing;
  if (outgoing.add(data, static_cast<std::size_t>(bytes), &all_sent) && !all_sent)
    Sender::instance().send_later(outgoing);
  return bytes;  // of a lost connection: the next read finds the loss
}

int read_from_socket(BIO* bio, char* data, int room) {
  BIO_clear_retry_flags(bio);
  ssize_t count = 0;
  do count = ::recv(connection_of(bio)->outgoing->fd(), data, static_cast<std::size_t>(room), MSG_DONTWAIT);
  while (count < 0 && errno == EINTR);
  if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) BIO_set_retry_read(bio);
  return static_cast<int>(count);
}

long control(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

int free_connection(BIO* bio) {
  const std::unique_ptr<Connection> connection(connection_of(bio));
  if (connection) Sender::instance().close(*connection->outgoing);
  ::BIO_set_data(bio, nullptr);
  return 1;
}

int type_of_method() {
  static const int type = ::BIO_get_new_index() | BIO_TYPE_SOURCE_SINK;
  return type;
}

const BIO_METHOD* socket_method() {
  static const BIO_METHOD* const method = [] {
    BIO_METHOD* const made = ::BIO_meth_new(type_of_method(), "lockstep");
    ::BIO_meth_set_write(made, &write_to_socket);
    ::BIO_meth_set_read(made, &read_from_socket);
    ::BIO_meth_set_ctrl(made, &control);
    ::BIO_meth_set_destroy(made, &free_connection);
    return made;
  }();
  return method;
}

// OpenSSL's own function of that name.
template <class Function>
Function* original(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

// ---- What Gloo calls

extern "C" {

int SSL_set_fd(SSL* ssl, int fd) {
  auto outgoing = Sender::instance().open(fd);
  BIO* const bio = outgoing == nullptr ? nullptr : ::BIO_new(socket_method());
  if (bio == nullptr) return 0;
  ::BIO_set_data(bio, new Connection{std::move(outgoing)});
  ::BIO_set_init(bio, 1);
  ::SSL_set_bio(ssl, bio, bio);
  return 1;
}

// Errors of earlier calls would be taken for this one's.
int SSL_do_handshake(SSL* ssl) {
  static auto* const do_handshake = original<decltype(SSL_do_handshake)>("SSL_do_handshake");
  ::ERR_clear_error();
  return do_handshake(ssl);
}

int SSL_write(SSL* ssl, const void* data, int bytes) {
  static auto* const write = original<decltype(SSL_write)>("SSL_write");
  if (ssl == nullptr) return bytes;  // Gloo has closed it
  BIO* const bio = ::SSL_get_wbio(ssl);
  if (bio == nullptr || ::BIO_method_type(bio) != type_of_method()) return write(ssl, data, bytes);  // not Gloo's
  ::ERR_clear_error();
  std::uint64_t& records = connection_of(bio)->records;
  records += 1 + static_cast<std::uint64_t>(bytes / kBytesPerRecord);
  if (records > kRecordsPerKey && ::SSL_key_update(ssl, SSL_KEY_UPDATE_NOT_REQUESTED) == 1) records = 0;
  const int written = write(ssl, data, bytes);
  return written > 0 ? written : bytes;
}

int SSL_read(SSL* ssl, void* data, int room) {
  static auto* const read = original<decltype(SSL_read)>("SSL_read");
  if (ssl == nullptr) return -1;
  ::ERR_clear_error();
  return read(ssl, data, room);
}

// Any other error than these makes Gloo close the connection and end its waits.
int SSL_get_error(const SSL* ssl, int result) {
  static auto* const get_error = original<decltype(SSL_get_error)>("SSL_get_error");
  if (ssl == nullptr) return SSL_ERROR_ZERO_RETURN;  // closed: nothing is left to do
  const int error = get_error(ssl, result);
  return error == SSL_ERROR_NONE || error == SSL_ERROR_WANT_READ ? error : SSL_ERROR_SSL;
}
}
