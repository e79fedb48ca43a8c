// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/machines/gloo_device.h"

#include <dlfcn.h>
#include <gloo/transport/tcp/attr.h>
#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "agent/meet/insecure_network.h"
#include "agent/meet/interfaces.h"
#include "lockstep/base/sockets/endpoint.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/machines/gloo_identity.h"
#include "lockstep/collective/machines/listener_filter.h"
#include "lockstep/collective/transport/cpu_transport.h"
#include "lockstep/cores.h"
#include "lockstep/error.h"

namespace gloo::transport::tcp::tls {  // as libtorch has it; Debian's headers do not
std::shared_ptr<transport::Device> CreateDevice(const struct attr& source, std::string key_file,
                                                std::string certificate_file, std::string trusted_file,
                                                std::string trusted_folder);
}  // namespace gloo::transport::tcp::tls

namespace lockstep {
namespace {

using Context = gloo::transport::Context;
using AddressBytes = std::vector<char>;  // of Gloo: a sockaddr_storage and the number of the connection

RendezvousError cannot_use_gloo(const std::string& why) {
  return RendezvousError({.what = "can't encrypt the connections between machines: " + why,
                          .likely = "another libtorch than 2.11, or files that are missing beside liblockstep.so",
                          .next = "install lockstep again; or, in a network that you trust, --insecure-network"});
}

// ---- Note [Gloo's TLS]

// gloo_openssl.cc, before Gloo opens `libssl.so` for the first time.
void load_openssl_for_gloo() {
  Dl_info own{};
  ::dladdr(reinterpret_cast<void*>(&join_gloo_network), &own);
  const auto path = std::filesystem::path(own.dli_fname).parent_path() / "lockstep_gloo_openssl.so";
  void* const ours = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (ours == nullptr) throw cannot_use_gloo(::dlerror());
  if (::dlopen("libssl.so", RTLD_NOW | RTLD_LOCAL) != ours)
    throw cannot_use_gloo("something else in this process has opened libssl.so");
}

void already_connected(void* /*context*/, void* /*store*/) {}

constexpr const char* kTable = "_ZTVN4gloo9transport3tcp3tls7ContextE";
constexpr const char* kConnectAll =
    "_ZN4gloo9transport3tcp7Context24createAndConnectAllPairsESt10shared_ptrINS_6IStoreEE";
constexpr std::size_t kBeforeFunctions = 2;  // the table begins with an offset and a type
constexpr std::size_t kConnectAllAt = kBeforeFunctions + 4;

// A copy of the class's table, in which connecting does nothing.
void** table_of_connected(void** functions) {
  Dl_info table{};
  const ElfW(Sym)* symbol = nullptr;
  ::dladdr1(functions, &table, reinterpret_cast<void**>(const_cast<ElfW(Sym)**>(&symbol)), RTLD_DL_SYMENT);
  void** const begin = functions - kBeforeFunctions;
  const std::size_t entries = symbol == nullptr ? 0 : symbol->st_size / sizeof(void*);
  void* const library = ::dlopen(table.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr || table.dli_sname == nullptr || std::strcmp(table.dli_sname, kTable) != 0 ||
      table.dli_saddr != begin || entries <= kConnectAllAt || begin[kConnectAllAt] != ::dlsym(library, kConnectAll))
    throw cannot_use_gloo("this libtorch has another Gloo");
  static auto& copy = *new std::vector<void*>(begin, begin + entries);  // contexts may live until the process has gone
  copy[kConnectAllAt] = reinterpret_cast<void*>(&already_connected);
  return copy.data() + kBeforeFunctions;
}

void leave_as_connected(Context& context) {
  void**& functions = *reinterpret_cast<void***>(&context);
  static void** const connected = table_of_connected(functions);
  functions = connected;
}

// ---- Addresses

AddressBytes with_number(AddressBytes address, std::size_t more) {
  std::int64_t number = 0;
  std::memcpy(&number, address.data() + sizeof(sockaddr_storage), sizeof number);
  number += to_int64(more);
  std::memcpy(address.data() + sizeof(sockaddr_storage), &number, sizeof number);
  return address;
}

sockaddr_storage socket_address(const AddressBytes& address) {
  sockaddr_storage result{};
  std::memcpy(&result, address.data(), sizeof result);
  return result;
}

// Returns what the others are told: their connections with this rank have consecutive numbers, by their ranks.
AddressBytes first_address(Context& context) {
  const AddressBytes first = context.createPair(0)->address().bytes();
  if (first.size() != sizeof(sockaddr_storage) + sizeof(std::int64_t))
    throw cannot_use_gloo("addresses of another form");
  for (int rank = 1; rank < context.size; ++rank)
    if (context.createPair(rank)->address().bytes() != with_number(first, to_size(rank)))
      throw cannot_use_gloo("connections without consecutive numbers");
  return first;
}

std::string text_of(const AddressBytes& address) {
  const sockaddr_storage socket = socket_address(address);
  return numeric(reinterpret_cast<const sockaddr*>(&socket),
                 socket.ss_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
}

gloo::transport::tcp::attr place_of(const TransportOptions& options) {
  gloo::transport::tcp::attr place;
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  const bool is_named = interface != nullptr && *interface != '\0';
  if (is_named) place.iface = interface;
  if (!is_named) place.hostname = options.address;
  return place;
}

// ---- Who takes part

constexpr std::string_view kInsecure = "insecure";

// Exchanges what each rank says of itself before they connect.
std::vector<std::string> exchange_alike(c10d::Store& store, const std::string& mine, const TransportOptions& options) {
  auto texts = exchange_texts(store, "gloo", mine, options);
  for (std::size_t rank = 0; rank < texts.size(); ++rank)
    if ((texts[rank] == kInsecure) != (mine == kInsecure))
      throw RendezvousError(
          {.what = concat("rank ", rank, texts[rank] == kInsecure ? " runs" : " does not run",
                          " with --insecure-network, and this rank ", mine == kInsecure ? "does" : "does not"),
           .here = options.describe,
           .likely = "LOCKSTEP_INSECURE_NETWORK or --insecure-network on some of the machines only",
           .next = "set it on all or on none"});
  return texts;
}

// ---- Listeners

// A device of Gloo, which several connections share.
class GlooListener {
 public:
  explicit GlooListener(GlooDevice device) : device_(std::move(device)) {}

  const GlooDevice& device() const { return device_; }

  // Admits those addresses from now on. Returns what the others are told.
  AddressBytes open_to(const std::vector<std::string>& addresses, Context& context) {
    const std::lock_guard lock(mutex_);
    const AddressBytes first = first_address(context);
    if (!filter_) filter_.emplace(socket_address(first));
    if (opened_ == 0) filter_->admit_only(addresses);
    ++opened_;
    return first;
  }

  // Nobody can, unless it was opened for another connection, too.
  void close() {
    const std::lock_guard lock(mutex_);
    if (--opened_ == 0) filter_->admit_nobody();
  }

 private:
  const GlooDevice device_;
  std::mutex mutex_;
  std::optional<ListenerFilter> filter_;
  int opened_ = 0;  // for so many connections
};

}  // namespace

class GlooNetwork {
 public:
  GlooNetwork(c10d::Store& store, const TransportOptions& options) {
    if (network_is_insecure()) {
      exchange_alike(store, std::string(kInsecure), options);
      return;
    }
    load_openssl_for_gloo();
    identity_.emplace();
    exchange_certificates(store, options);
  }

  bool is_encrypted() const { return identity_.has_value(); }
  const std::vector<std::string>& admitted() const { return admitted_; }

  // One of those that there are, or another one while there are fewer than cores. See Note [Shared listeners].
  std::shared_ptr<GlooListener> next_listener(const TransportOptions& options) {
    const std::lock_guard lock(mutex_);
    const std::size_t next = taken_++ % std::max<std::size_t>(1, usable_cores().size());
    if (next >= listeners_.size()) {
      listeners_.push_back(std::make_shared<GlooListener>(make_device(options)));
      return listeners_.back();
    }
    return listeners_[next];
  }

 private:
  // A line with this machine's addresses, and the certificate.
  void exchange_certificates(c10d::Store& store, const TransportOptions& options) {
    const std::string addresses = concat(options.address, ",", join(own_addresses(), ","));
    const auto texts = exchange_alike(store, concat(addresses, "\n", identity_->certificate()), options);
    std::vector<std::string> certificates;
    for (const std::string& text : texts) {
      const std::size_t line = std::min(text.find('\n'), text.size());
      for (const std::string& address : split(text.substr(0, line), ',')) admitted_.push_back(address);
      certificates.push_back(text.substr(line));
    }
    identity_->trust(certificates);
  }

  GlooDevice make_device(const TransportOptions& options) const {
    const auto place = place_of(options);
    if (identity_)
      return gloo::transport::tcp::tls::CreateDevice(place, identity_->key_file(), identity_->certificate_file(),
                                                     identity_->trusted_file(), "");
    if (!place.iface.empty()) return c10d::ProcessGroupGloo::createDeviceForInterface(place.iface);
    return c10d::ProcessGroupGloo::createDeviceForHostname(place.hostname);
  }

  std::optional<GlooIdentity> identity_;  // none: not encrypted
  std::vector<std::string> admitted_;     // addresses of the ranks' machines
  std::mutex mutex_;
  std::vector<std::shared_ptr<GlooListener>> listeners_;
  std::size_t taken_ = 0;  // so often one of them was
};

namespace {

// ---- The device of one connection

class TlsDevice final : public gloo::transport::Device {
 public:
  TlsDevice(std::shared_ptr<GlooNetwork> network, StorePtr store, TransportOptions options)
      : network_(std::move(network)),
        listener_(network_->next_listener(options)),
        store_(std::move(store)),
        options_(std::move(options)) {}

  ~TlsDevice() override {
    try {
      let_nobody_else_in();
    } catch (const std::exception&) {  // the job's addresses can still connect to what nobody listens to
    }
  }
  TlsDevice& operator=(TlsDevice&&) = delete;

  std::string str() const override { return listener_->device()->str(); }
  const std::string& getPCIBusID() const override { return listener_->device()->getPCIBusID(); }
  int getInterfaceSpeed() const override { return listener_->device()->getInterfaceSpeed(); }

  std::shared_ptr<Context> createContext(int rank, int size) override {
    auto context = listener_->device()->createContext(rank, size);
    context->setTimeout(options_.timeout);
    connect(*context);
    leave_as_connected(*context);
    return context;
  }

  void let_nobody_else_in() {
    if (std::exchange(is_open_, false)) listener_->close();
  }

 private:
  // All ranks connect in the order of their numbers, so both ends of the first missing connection always wait for each other.
  void connect(Context& context) {
    const AddressBytes own = listener_->open_to(network_->admitted(), context);
    is_open_ = true;
    const auto all = exchange_texts(*store_, "gloo address", {own.begin(), own.end()}, options_);
    for (int rank = 0; rank < context.size; ++rank)
      if (rank != context.rank) connect_to(context, rank, all[to_size(rank)]);
  }

  void connect_to(Context& context, int rank, const std::string& told) const {
    const AddressBytes address(told.begin(), told.end());
    if (address.size() != sizeof(sockaddr_storage) + sizeof(std::int64_t))
      throw cannot_use_gloo("an address of another form");
    try {
      context.getPair(rank)->connect(with_number(address, to_size(context.rank)));
    } catch (const std::exception& error) {
      throw RendezvousError(
          {.what = concat("can't connect to rank ", rank, " at ", text_of(address), ": ", first_line_of(error)),
           .here = concat(options_.describe, " at ", options_.address),
           .likely =
               "a firewall between the machines drops packets, that rank died while starting, or a stranger answers",
           .next = "look at the other ranks' output; GLOO_SOCKET_IFNAME chooses another network"});
    }
  }

  std::shared_ptr<GlooNetwork> network_;
  std::shared_ptr<GlooListener> listener_;
  StorePtr store_;
  TransportOptions options_;
  bool is_open_ = false;  // the listener, for this connection
};

}  // namespace

std::shared_ptr<GlooNetwork> join_gloo_network(c10d::Store& store, const TransportOptions& options) {
  return std::make_shared<GlooNetwork>(store, options);
}

GlooDevice device_on(const std::shared_ptr<GlooNetwork>& network, const StorePtr& store,
                     const TransportOptions& options) {
  if (network->is_encrypted()) return std::make_shared<TlsDevice>(network, store, options);
  return network->next_listener(options)->device();
}

void let_nobody_else_in(gloo::transport::Device& device) {
  if (auto* const tls = dynamic_cast<TlsDevice*>(&device)) tls->let_nobody_else_in();
}

}  // namespace lockstep
