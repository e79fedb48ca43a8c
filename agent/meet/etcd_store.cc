// SPDX-License-Identifier: Apache-2.0
// agent/meet/etcd_store.cc: what the launchers of a job agree on, in etcd: any machine may die, also one of etcd's own.
//
// Flow:    membership_store.h -> here -> etcd's JSON gateway (etcd 3.4 and later), through libcurl
// Owns:    a lease, and the keys PREFIX JOB/..., of which the record stays for the next job of that name
// Threads: one
#include <openssl/evp.h>

#include <algorithm>
#include <utility>

#include <nlohmann/json.hpp>

#include "agent/meet/interfaces.h"
#include "agent/meet/membership_store.h"
#include "lockstep/base/retry.h"
#include "lockstep/base/shared_library.h"
#include "lockstep/base/sockets/port.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

using nlohmann::json;

constexpr milliseconds kAskEtcdEvery{200};
constexpr milliseconds kAnswersWithin{2000};  // each of etcd's members, or in a part of lost_after
constexpr milliseconds kLeastPatience{200};

// The few parts of libcurl's stable binary interface that are used here.
enum CurlOption {
  kWriteData = 10001,
  kUrl = 10002,
  kProxy = 10004,
  kPostFields = 10015,
  kCertificate = 10025,
  kCaFile = 10065,
  kKey = 10087,
  kWriteFunction = 20011,
  kFailOnError = 45,
  kNoSignal = 99,
  kTimeoutMs = 155,
};

struct Curl {
  Curl() {
    if (!library.is_complete())
      throw EnvironmentError({.what = "--rdzv-backend etcd needs libcurl.so.4, which this machine does not have",
                              .next = "install it (Debian: libcurl4), or use --rdzv-backend c10d"});
    handle = init();
  }

  SharedLibrary library{"libcurl.so.4"};
  void* (*init)() = library.find("curl_easy_init");
  int (*set)(void*, CurlOption, ...) = library.find("curl_easy_setopt");
  int (*perform)(void*) = library.find("curl_easy_perform");
  void (*reset)(void*) = library.find("curl_easy_reset");
  const char* (*describe)(int) = library.find("curl_easy_strerror");
  void* handle = nullptr;  // with its connections, which stay open; until the process ends
};

size_t append(const char* bytes, size_t size, size_t count, void* text) {
  static_cast<std::string*>(text)->append(bytes, size * count);
  return size * count;
}

std::string to_base64(const std::string& bytes) {
  std::string text((bytes.size() + 2) / 3 * 4 + 1, '\0');
  const int length =
      ::EVP_EncodeBlock(reinterpret_cast<unsigned char*>(text.data()),
                        reinterpret_cast<const unsigned char*>(bytes.data()), static_cast<int>(bytes.size()));
  text.resize(to_size(length));
  return text;
}

std::string from_base64(const std::string& text) {
  std::string bytes(text.size() / 4 * 3 + 1, '\0');
  const int length =
      ::EVP_DecodeBlock(reinterpret_cast<unsigned char*>(bytes.data()),
                        reinterpret_cast<const unsigned char*>(text.data()), static_cast<int>(text.size()));
  const size_t padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
  bytes.resize(length < 0 ? 0 : to_size(length) - padding);
  return bytes;
}

// etcd writes 64-bit numbers as texts, and leaves those out that are 0.
int64_t number_in(const json& object, const char* name) {
  int64_t number = 0;
  return parse_int(object.value(name, "0"), number) ? number : 0;
}

class EtcdStore final : public MembershipStore {
 public:
  explicit EtcdStore(const Meeting& meeting)
      : MembershipStore(""), meeting_(meeting), prefix_(concat(meeting.prefix, meeting.job, "/")), end_(prefix_) {
    end_.back() += 1;  // behind all keys with this prefix
  }
  ~EtcdStore() override {
    if (lease_ != 0) post("/v3/lease/revoke", {{"ID", lease_}});
  }

  std::optional<Entries> read() override try {
    const auto answer = post("/v3/kv/range", {{"key", to_base64(prefix_)}, {"range_end", to_base64(end_)}});
    if (!answer) return std::nullopt;
    Entries entries;
    for (const json& each : answer->value("kvs", json::array()))
      entries.emplace(from_base64(each.value("key", "")).substr(prefix_.size()),
                      Entry{from_base64(each.value("value", "")), number_in(each, "create_revision")});
    return entries;
  } catch (const std::exception&) {  // another program's answer
    return std::nullopt;
  }

  // The lease may have ended meanwhile, while etcd could not be reached; then there is another one.
  bool write_own(const std::string& key, const std::string& value) override {
    if (lease_ != 0) {
      const auto kept = post("/v3/lease/keepalive", {{"ID", lease_}});
      if (!kept) return false;
      if (number_in(kept->value("result", json::object()), "TTL") == 0) lease_ = 0;
    }
    const bool is_new = lease_ == 0;
    if (is_new && (lease_ = new_lease(std::max<int64_t>(1, (meeting_.silence.count() + 999) / 1000))) == 0)
      return false;
    if (is_new) written_.clear();
    if (value == written_) return true;
    if (!post("/v3/kv/put", {{"key", to_base64(prefix_ + key)}, {"value", to_base64(value)}, {"lease", lease_}}))
      return false;
    written_ = value;
    return true;
  }

  bool replace(const std::string& key, const std::string& expected, const std::string& value) override {
    const std::string name = to_base64(prefix_ + key);
    json is_expected{{"key", name}, {"result", "EQUAL"}, {"target", "CREATE"}, {"create_revision", 0}};
    if (!expected.empty())
      is_expected = {{"key", name}, {"result", "EQUAL"}, {"target", "VALUE"}, {"value", to_base64(expected)}};
    const json put{{"key", name}, {"value", to_base64(value)}};
    const auto answer = post("/v3/kv/txn", {{"compare", json::array({is_expected})},
                                            {"success", json::array({json{{"request_put", put}}})}});
    return answer && answer->value("succeeded", false);
  }

  std::string name() const override { return concat("etcd at ", meeting_.places[place_].text()); }
  const std::string& why() const { return why_; }

  // This machine's address on the way to etcd; where etcd runs here, the one that others probably reach.
  void find_own_address(const Deadline& deadline) {
    const auto towards = own_address_towards(look_up(meeting_.places[place_], deadline).addresses);
    own_address_ = towards.value_or("127.0.0.1");
    if (std::string others = address_for_others(); is_loopback(own_address_) && !others.empty())
      own_address_ = std::move(others);
  }

 private:
  int64_t new_lease(int64_t seconds) {
    const auto granted = post("/v3/lease/grant", {{"TTL", seconds}});
    return granted ? number_in(*granted, "ID") : 0;
  }

  // Asks the member that has answered last, then each other one.
  std::optional<json> post(const std::string& path, const json& request) {
    for (size_t i = 0; i < meeting_.places.size(); ++i) {
      if (auto answer = post_to(meeting_.places[place_], path, request.dump())) return answer;
      place_ = (place_ + 1) % meeting_.places.size();
    }
    return std::nullopt;
  }

  std::optional<json> post_to(const Endpoint& member, const std::string& path, const std::string& request) try {
    const bool secure = !meeting_.certificates.empty();
    const std::string url = concat(secure ? "https://" : "http://", member.text(), path);
    std::string answer;
    curl_.reset(curl_.handle);
    curl_.set(curl_.handle, kUrl, url.c_str());
    curl_.set(curl_.handle, kPostFields, request.c_str());
    curl_.set(curl_.handle, kWriteFunction, &append);
    curl_.set(curl_.handle, kWriteData, &answer);
    curl_.set(curl_.handle, kFailOnError, 1L);
    curl_.set(curl_.handle, kNoSignal, 1L);
    curl_.set(curl_.handle, kProxy, "");  // http_proxy is for the world outside
    curl_.set(curl_.handle, kTimeoutMs, static_cast<long>(patience_.count()));
    if (secure) curl_.set(curl_.handle, kCaFile, meeting_.certificates.c_str());
    if (!meeting_.certificate.empty()) curl_.set(curl_.handle, kCertificate, meeting_.certificate.c_str());
    if (!meeting_.key.empty()) curl_.set(curl_.handle, kKey, meeting_.key.c_str());
    const int failed = curl_.perform(curl_.handle);
    if (failed != 0) why_ = concat(member.text(), ": ", curl_.describe(failed));
    return failed == 0 ? std::optional(json::parse(answer)) : std::nullopt;
  } catch (const json::exception&) {
    why_ = concat("what answers at ", member.text(), " is not etcd");
    return std::nullopt;
  }

  const Meeting meeting_;
  const milliseconds patience_ =
      std::clamp(meeting_.silence / (3 * to_int(meeting_.places.size())), kLeastPatience, kAnswersWithin);
  std::string prefix_;
  std::string end_;
  Curl curl_{};
  size_t place_ = 0;  // of the member that has answered last
  int64_t lease_ = 0;
  std::string written_{};  // under this lease
  std::string why_{};      // the last request has failed
};

}  // namespace

std::unique_ptr<MembershipStore> open_etcd_store(const Meeting& meeting, const Deadline& deadline) {
  auto store = std::make_unique<EtcdStore>(meeting);
  if (!retry(deadline, kAskEtcdEvery, [&] { return store->read(); }))
    throw RendezvousError({.what = concat("etcd does not answer: ", store->why()),
                           .here = concat("--rdzv-endpoint ", meeting.places.front().text()),
                           .likely = "a wrong address or port, a firewall, or etcd requires TLS",
                           .next = "give --rdzv-endpoint HOST:PORT[,HOST:PORT...] of its members, and for TLS "
                                   "--rdzv-conf cacert=FILE,cert=FILE,key=FILE"});
  store->find_own_address(deadline);
  return store;
}

}  // namespace lockstep
