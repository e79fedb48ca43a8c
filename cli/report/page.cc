// SPDX-License-Identifier: Apache-2.0
#include "cli/report/page.h"

namespace lockstep::report {
namespace {

void put(std::string& page, const std::string& mark, const std::string& text) {
  page.replace(page.find(mark), mark.size(), text);
}

// As the content of <script>, which ends at the first "</script", wherever it stands.
std::string script_data(const Json& data) {
  std::string text = data.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
  for (std::size_t at = 0; (at = text.find('<', at)) != std::string::npos;) text.replace(at, 1, "\\u003c");
  return text;
}

}  // namespace

// The data last: nothing is looked for in it.
std::string page_of(const Json& data) {
  std::string page = kPageHtml;
  put(page, "/*css*/", kPageCss);
  put(page, "/*page*/", kPageJs);
  put(page, "/*chart*/", kChartJs);
  put(page, "/*data*/", script_data(data));
  return page;
}

}  // namespace lockstep::report
