// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/event_file.h"

#include <nmmintrin.h>

#include <cstring>

#include <protozero/pbf_writer.hpp>

namespace lockstep::events {
namespace {

using Json = nlohmann::ordered_json;
using protozero::pbf_writer;

// ---- TFRecord: length, its checksum, the data, its checksum

std::uint32_t crc32c(const char* data, std::size_t bytes) {
  std::uint32_t crc = ~std::uint32_t{0};
  for (; bytes >= 8; bytes -= 8, data += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, data, 8);
    crc = static_cast<std::uint32_t>(_mm_crc32_u64(crc, word));
  }
  for (; bytes > 0; --bytes, ++data) crc = _mm_crc32_u8(crc, static_cast<unsigned char>(*data));
  return ~crc;
}

template <class Number>
void append(std::string& record, Number number) {
  record.append(reinterpret_cast<const char*>(&number), sizeof(number));
}

// The checksum that TFRecord has of the last `bytes` bytes: rotated and shifted, so that it can be checksummed itself.
void append_checksum(std::string& record, std::size_t bytes) {
  const std::uint32_t crc = crc32c(record.data() + record.size() - bytes, bytes);
  append(record, ((crc >> 15U) | (crc << 17U)) + 0xa282ead8U);
}

std::string framed(const std::string& data) {
  std::string record;
  append(record, std::uint64_t{data.size()});
  append_checksum(record, sizeof(std::uint64_t));
  record += data;
  append_checksum(record, data.size());
  return record;
}

// ---- Messages, with the numbers of their fields

// A message whose fields `fill` adds.
template <class Fill>
std::string message(const Fill& fill) {
  std::string bytes;
  pbf_writer writer(bytes);
  fill(writer);
  return bytes;
}

// tensorflow.Event
template <class Fill>
std::string event(const Moment& moment, const Fill& fill) {
  return framed(message([&](pbf_writer& event) {
    event.add_double(1, moment.time);
    event.add_int64(2, moment.step);
    fill(event);
  }));
}

// tensorflow.Summary with one Value
template <class Fill>
std::string value_event(const Moment& moment, const std::string& tag, const Fill& fill) {
  return event(moment, [&](pbf_writer& event) {
    pbf_writer summary(event, 5);
    pbf_writer value(summary, 1);
    value.add_string(1, tag);
    fill(value);
  });
}

// SummaryMetadata: whose plugin's value it is, and what the plugin wants to know.
void add_plugin(pbf_writer& value, const std::string& name, const std::string& content = {}) {
  pbf_writer metadata(value, 9);
  pbf_writer plugin(metadata, 1);
  plugin.add_string(1, name);
  if (!content.empty()) plugin.add_bytes(2, content);
}

// HParamsPluginData with one of its messages
std::string hparams_event(const Moment& moment, const std::string& tag, int field, const std::string& content) {
  const std::string data = message(
      [&](pbf_writer& plugin_data) { plugin_data.add_message(static_cast<protozero::pbf_tag_type>(field), content); });
  return value_event(moment, tag, [&](pbf_writer& value) { add_plugin(value, "hparams", data); });
}

// google.protobuf.Value
std::string json_value(const Json& json) {
  return message([&](pbf_writer& value) {
    if (json.is_boolean())
      value.add_bool(4, json.get<bool>());
    else if (json.is_number())
      value.add_double(2, json.get<double>());
    else
      value.add_string(3, json.is_string() ? json.get<std::string>() : json.dump());
  });
}

std::string experiment(const Json& values, const std::vector<std::string>& metrics) {
  enum { kString = 1, kBool = 2, kFloat64 = 3 };
  return message([&](pbf_writer& experiment) {
    for (const auto& [name, json] : values.items()) {
      pbf_writer info(experiment, 4);
      info.add_string(1, name);
      info.add_enum(4, json.is_boolean() ? kBool : json.is_number() ? kFloat64 : kString);
    }
    for (const std::string& tag : metrics) {
      pbf_writer info(experiment, 5);
      pbf_writer name(info, 1);
      name.add_string(2, tag);
    }
  });
}

std::string session_start_info(const Moment& moment, const Json& values) {
  return message([&](pbf_writer& start) {
    for (const auto& [name, json] : values.items()) {
      pbf_writer entry(start, 1);
      entry.add_string(1, name);
      entry.add_message(2, json_value(json));
    }
    start.add_double(5, moment.time);
  });
}

}  // namespace

std::string version(const Moment& moment) {
  return event(moment, [](pbf_writer& event) { event.add_string(3, "brain.Event:2"); });
}

std::string session_start(const Moment& moment) {
  return event(moment, [](pbf_writer& event) {
    pbf_writer session(event, 7);
    session.add_enum(1, 1);  // START
  });
}

std::string scalars(const Moment& moment, const std::vector<Scalar>& scalars) {
  return event(moment, [&](pbf_writer& event) {
    pbf_writer summary(event, 5);
    for (const Scalar& scalar : scalars) {
      pbf_writer value(summary, 1);
      value.add_string(1, scalar.tag);
      value.add_float(2, static_cast<float>(scalar.value));
    }
  });
}

std::string text(const Moment& moment, const std::string& tag, const std::string& markdown) {
  return value_event(moment, tag, [&](pbf_writer& value) {
    {
      pbf_writer tensor(value, 8);
      tensor.add_enum(1, 7);  // DT_STRING, without a shape: a scalar
      tensor.add_bytes(8, markdown);
    }
    add_plugin(value, "text");
  });
}

std::string hparams(const Moment& moment, const Json& values, const std::vector<std::string>& metrics) {
  return hparams_event(moment, "_hparams_/experiment", 2, experiment(values, metrics)) +
         hparams_event(moment, "_hparams_/session_start_info", 3, session_start_info(moment, values));
}

std::string hparams_end(const Moment& moment, bool success) {
  const std::string end = message([&](pbf_writer& info) {
    info.add_enum(1, success ? 1 : 2);
    info.add_double(2, moment.time);
  });
  return hparams_event(moment, "_hparams_/session_end_info", 4, end);
}

}  // namespace lockstep::events
